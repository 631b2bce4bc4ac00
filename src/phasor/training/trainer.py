"""One update after another: gradients, whether they are finite, and the optimizer's step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.generation import evaluating
from phasor.ops.attention import cudnn
from phasor.training.float8 import convert_to_float8
from phasor.training.graphs import Graphs
from phasor.training.loss import cross_entropy, loss_of
from phasor.training.optimizer import EMA, averaged, build_optimizer, optimizer_tensors, restore_optimizer, set_rate
from phasor.training.state import State
from phasor.transformer import Block, Transformer


@dataclass(frozen=True)
class Update:
    """What came of an update; where `wrong` names tensors that are not finite, no weight was changed."""

    loss: float
    norm: float
    rate: float
    wrong: tuple[str, ...] = ()


class Pending:
    """An update that a device may still be busy with."""

    def __init__(self, measured: Tensor, rate: float, names: Sequence[str]) -> None:
        self.rate, self.names = rate, names
        self.measured = measured.to("cpu", non_blocking=True)
        self.done = torch.cuda.Event() if measured.is_cuda else None
        if self.done is not None:
            self.done.record()

    def update(self) -> Update:
        """What came of it, once the device is through with it; later updates are not waited for."""
        if self.done is not None:
            self.done.synchronize()
        loss, norm, *norms = self.measured.tolist()
        if math.isfinite(loss) and math.isfinite(norm):
            return Update(loss, norm, self.rate)
        wrong = [] if math.isfinite(loss) else ["the loss"]
        wrong += [f"the gradient of {name}" for name, n in zip(self.names, norms, strict=True) if not math.isfinite(n)]
        return Update(loss, norm, self.rate, tuple(wrong) or ("the norm of all gradients",))


class Trainer:
    """A model and everything that changes with its updates.

    What is random in an update is drawn from generators that are set from the recipe's seed and the update's number,
    so an update depends on nothing but the weights, the optimizer's state, the batches and that number.
    """

    def __init__(self, model: Transformer, recipe: Recipe, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        self.device = device_of(recipe.train.device)
        self.model = model.to(self.device, getattr(torch, recipe.train.param_dtype)).train()
        if recipe.train.precision == "float8":
            convert_to_float8(self.model)
        if recipe.train.activation_checkpointing:
            checkpoint_blocks(self.model)
        if recipe.train.compile:
            compile_blocks(self.model, dynamic=recipe.task == "translation")
        graphs = recipe.train.cuda_graphs and self.device.type == "cuda"
        self.graphs = Graphs(lambda batch: self.changed(self.gradients(0, [batch], 0.0))) if graphs else None
        self.optimizer = build_optimizer(self.model, recipe.optimizer, graphs, recipe.train.seed)
        self.named = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.ema = None if recipe.train.ema_decay is None else EMA(self.model, recipe.train.ema_decay)

    def gradients(self, step: int, batches: Sequence[Batch], count: float) -> Tensor:
        """The loss of an update, the norm of all its gradients, and that of each; the host does not wait for them.

        `count` is the number of tokens predicted in all the batches, each of which weighs as much as it has.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part, batch in enumerate(batches):
            if part > 0:
                self.seed(step, part)
            with self.computing():
                loss, _ = loss_of(self.model, batch, self.recipe)
            if len(batches) > 1:
                loss = loss * (batch.weights.sum() / max(count, 1.0))
            loss.backward()
            total += loss.detach()
        norms = torch.stack(torch._foreach_norm([gradient_of(weight) for weight in self.named.values()]))
        return torch.cat((total[None], norms.norm()[None], norms))

    @torch.no_grad()
    def changed(self, measured: Tensor) -> Tensor:
        """Change the weights by the gradients, clipped, unless anything that was measured is not finite.

        That is decided where the gradients are, so that the host need not wait.
        """
        clip = self.recipe.train.max_grad_norm
        if clip is not None:
            self.optimizer.scale = (clip / (measured[1] + 1e-6)).clamp(max=1.0)
        self.optimizer.found_inf = (~measured[:2].isfinite().all()).float()  # where it is 1, all is left as it is
        self.optimizer.step()
        return measured

    def update(self, step: int, batches: Sequence[Batch], count: float) -> Pending:
        """One update; the host does not wait for it."""
        rate = self.recipe.schedule.rate_at(step, self.steps, self.recipe.optimizer.lr)
        set_rate(self.optimizer, rate)
        self.seed(step, 0)
        if self.graphs is not None:
            measured = self.graphs(batches[0])
        else:
            measured = self.changed(self.gradients(step, batches, count))
        if self.ema is not None:
            self.ema.update(self.model)
        return Pending(measured, rate, tuple(self.named))

    @torch.no_grad()
    def validation(self, batches: Iterable[Batch], stopped: Callable[[], bool]) -> float | None:
        """The mean cross-entropy of batches, by the averaged weights where there are any; None if stopped midway."""
        total = count = 0.0
        with self.measuring():
            for batch in batches:
                if stopped():
                    return None
                here = batch.to(self.device)
                with self.computing():
                    loss, _ = cross_entropy(self.model, here)
                weight = batch.count
                total += float(loss) * weight
                count += weight
        return total / count if count else math.nan

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The model as it is used: without dropout, with averaged weights where there are any, not compiled."""
        with evaluating(self.model), averaged(self.model, self.ema), torch.compiler.set_stance("force_eager"):
            yield

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors to save, in groups."""
        groups = {"model": self.model.state_dict(), "optimizer": optimizer_tensors(self.optimizer, self.model)}
        return groups if self.ema is None else groups | {"ema": self.ema.weights}

    def restore(self, state: State) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state.tensors["model"])
        restore_optimizer(self.optimizer, self.model, state.tensors["optimizer"])
        if self.ema is not None:
            self.ema.restore(state.tensors["ema"], state.numbers["ema_updates"])

    def not_finite(self) -> list[str]:
        """The names of weights that are not finite."""
        return not_finite(self.model.named_parameters())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Matrix products in bfloat16 where the recipe says so; without cuDNN where every batch has another shape.

        For each new shape cuDNN plans its attention anew, which takes longer than a step.
        """
        kernels = sdpa_kernel(cudnn.OTHERS) if self.recipe.task == "translation" else nullcontext()
        with autocast(self.recipe, self.device), kernels:
            yield

    def seed(self, step: int, part: int) -> None:
        """Set the generators that dropout draws from."""
        number = seed_of(self.recipe.train.seed, step, part)
        torch.default_generator.manual_seed(number)  # torch.manual_seed asks every kind of device, and takes longer
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 where a recipe says so; "auto" is on a GPU.

    >>> with autocast(Recipe(), torch.device("cpu")):
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    precision = recipe.train.precision
    wanted = device.type == "cuda" if precision == "auto" else precision != "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits out of some numbers; other numbers give another one.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    return [name for name, tensor in named if tensor is not None and not bool(torch.isfinite(tensor).all())]


def gradient_of(weight: Tensor) -> Tensor:
    """A weight's gradient; zeros where the batch did not reach it, as an expert that got no token."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def compile_blocks(model: Transformer, *, dynamic: bool) -> None:
    """Compile block by block, so that one compilation serves all layers that are alike."""
    for part in model.modules():
        if isinstance(part, Block):
            part.compile(dynamic=dynamic)


def checkpoint_blocks(model: Transformer) -> None:
    """Have every block compute its activations again in the backward pass instead of keeping them."""
    for part in model.modules():
        if isinstance(part, Block):
            setattr(part, "forward", partial(checkpoint, part.forward, use_reentrant=False))  # noqa: B010


def device_of(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        return device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
