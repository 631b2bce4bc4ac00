"""The training step: forward, backward, clip, optimizer step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from phasor.checkpoints.tensors import TensorSource
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.device import resolve_device
from phasor.nn.mode import eval_mode
from phasor.ops.attention import cudnn
from phasor.training.float8 import convert_to_float8
from phasor.training.graphs import StepGraphs
from phasor.training.objectives import objective_of
from phasor.training.optimizer import (
    EMA,
    NamedWeights,
    build_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_lr,
    swap_weights,
)
from phasor.training.state import TrainingState, save_state
from phasor.training.trained import saved_names
from phasor.transformer import Transformer


@dataclass(frozen=True)
class StepResult:
    """What came of an optimizer step; where `not_finite` names tensors, no weight was changed."""

    loss: float
    grad_norm: float
    lr: float
    not_finite: tuple[str, ...] = ()
    stop: bool = False  # whether a signal asks one of several processes to stop
    metrics: dict[str, float] = field(default_factory=dict)  # what the objective measures besides


class StepHandle:
    """An optimizer step that a device may still be busy with.

    `stats` are its loss, the norm of its gradients, that of each of them, the metrics of the objective, and with
    several processes whether one of them was asked to stop.
    """

    def __init__(self, stats: Tensor, lr: float, names: Sequence[str], metrics: Sequence[str] = ()) -> None:
        self.lr, self.names, self.metrics = lr, names, metrics
        self.stats = stats.to("cpu", non_blocking=True)
        self.done = torch.cuda.Event() if stats.is_cuda else None
        if self.done is not None:
            self.done.record()

    def result(self) -> StepResult:
        """What came of the step, once the device is through with it; later steps are not waited for."""
        if self.done is not None:
            self.done.synchronize()
        loss, grad_norm, *rest = self.stats.tolist()
        norms, others = rest[: len(self.names)], rest[len(self.names) :]
        metrics, stop = dict(zip(self.metrics, others, strict=False)), any(others[len(self.metrics) :])
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return StepResult(loss, grad_norm, self.lr, stop=stop, metrics=metrics)
        wrong = [] if math.isfinite(loss) else ["the loss"]
        wrong += [f"the gradient of {name}" for name, n in zip(self.names, norms, strict=True) if not math.isfinite(n)]
        return StepResult(loss, grad_norm, self.lr, tuple(wrong) or ("the norm of all gradients",), stop)


class Trainer:
    """A model and everything that changes with its optimizer steps.

    What is random in a step is drawn from generators that are set from the recipe's seed and the step's number, so a
    step depends on nothing but the weights, the optimizer's state, the batches and that number.
    """

    def __init__(self, model: Transformer, recipe: Recipe, steps: int) -> None:
        self.recipe, self.steps, self.objective = recipe, steps, objective_of(recipe)
        self.device = resolve_device(recipe.train.device)
        self.model = self.place(model).train()
        if recipe.train.precision == "float8":
            convert_to_float8(self.model)
        if recipe.train.activation_checkpointing:
            checkpoint_blocks(self.model)
        if compiles_blocks(recipe, self.device):
            self.compile(dynamic=self.varied_batches)
        self.weights = self.shard()
        graphs = recipe.train.cuda_graphs and self.device.type == "cuda"
        self.graphs = StepGraphs(lambda batch: self.compute_step(0, [batch], 0.0)) if graphs else None
        self.optimizer = build_optimizer(self.model, recipe.optimizer, graphs, recipe.train.seed, self.weights)
        self.parameters = {name: weight for name, weight in self.weights.named_parameters() if weight.requires_grad}
        self.ema = None if recipe.train.ema_decay is None else EMA(self.weights, recipe.train.ema_decay)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weights that are trained."""
        return tuple(self.parameters)

    @property
    def num_parameters(self) -> int:
        """How many parameters the model has."""
        return sum(weight.numel() for weight in self.model.parameters())

    def place(self, model: Transformer) -> Transformer:
        """The model on its device, in the dtype of its parameters; that with an adapter has its dtypes already."""
        dtype = None if model.adapters else getattr(torch, self.recipe.train.param_dtype)
        return model.to(self.device, dtype)

    def compile(self, *, dynamic: bool) -> None:
        """Compile the model's blocks."""
        self.model.compile(dynamic=dynamic)

    def shard(self) -> NamedWeights:
        """The weights that this process trains: all of them."""
        return self.model

    def train_step(self, step: int, batches: Sequence[Batch], count: float) -> StepHandle:
        """One optimizer step; the host does not wait for it.

        `count` is the number of tokens predicted in all the batches, each of which weighs as much as it has.
        """
        lr = self.recipe.schedule.lr_at(step, self.steps, self.recipe.optimizer.lr)
        set_lr(self.optimizer, lr)
        self.seed(step, 0)
        stats = self.compute_step(step, batches, count) if self.graphs is None else self.graphs(batches[0])
        if self.ema is not None:
            self.ema.update(self.weights, stats[:2].isfinite().all())
        return StepHandle(stats, lr, self.names, self.objective.metrics)

    def compute_step(self, step: int, batches: Sequence[Batch], count: float) -> Tensor:
        """What the device does in a step, and its statistics: all of it can be captured in a CUDA graph."""
        stats = self.forward_backward(step, batches, count)
        self.clip_gradients(stats)
        self.optimizer_step(stats)
        return stats

    def forward_backward(self, step: int, batches: Sequence[Batch], count: float) -> Tensor:
        """The loss of a step, the norm of all its gradients, and that of each; the host does not wait for them."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        metrics = torch.zeros(len(self.objective.metrics), device=self.device)
        for part, batch in enumerate(batches):
            if part > 0:
                self.seed(step, part)
            loss = self.loss(batch)
            share = batch.weights.sum() / max(count, 1.0) if len(batches) > 1 else 1.0
            if len(batches) > 1:
                loss = loss * share
            loss.backward()
            total += loss.detach()
            if self.objective.measured is not None:
                metrics += self.objective.measured * share
        norms = torch.stack(torch._foreach_norm([gradient_of(weight) for weight in self.parameters.values()]))
        return torch.cat((total[None], norms.norm()[None], norms, metrics))

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch that training minimizes."""
        with self.precision():
            return self.objective.loss(self.model, batch)

    @torch.no_grad()
    def clip_gradients(self, stats: Tensor) -> None:
        """Have the optimizer scale the gradients to `max_grad_norm` at most, where they are read."""
        max_norm = self.recipe.train.max_grad_norm
        if max_norm is not None:
            self.optimizer.scale = (max_norm / (stats[1] + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def optimizer_step(self, stats: Tensor) -> None:
        """Change the weights by the gradients, unless the loss or a gradient is not finite.

        That is decided where the gradients are, so that the host need not wait.
        """
        self.optimizer.found_inf = (~stats[:2].isfinite().all()).float()  # where it is 1, all is left as it is
        self.optimizer.step()

    @torch.no_grad()
    def validation_loss(self, batches: Iterable[Batch], stopped: Callable[[], bool]) -> float | None:
        """The mean validation loss of batches, with the averaged weights if there are any; None if stopped midway."""
        total = count = 0.0
        with self.eval_mode():
            for batch in batches:
                if stopped():
                    return None
                here = batch.to(self.device)
                with self.precision():
                    loss = self.objective.validation_loss(self.model, here)
                total += float(loss) * batch.count
                count += batch.count
        return total / count if count else math.nan

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The model as it is used: without dropout, with averaged weights if there are any, not compiled."""
        with eval_mode(self.model), swap_weights(self.weights, self.ema), torch.compiler.set_stance("force_eager"):
            yield

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors to save, in groups."""
        held = self.model.state_dict()
        weights = {name: held[name] for name in saved_names(self.model)}
        groups = {"model": weights, "optimizer": optimizer_tensors(self.optimizer, self.model)}
        return groups if self.ema is None else groups | {"ema": weights | self.ema.weights}

    def save(self, folder: Path, step: int, values: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step, with some values beside the tensors."""
        save_state(folder, step, self.tensors(), values)

    def inference_model(self) -> Transformer:
        """The model to sample from when it is trained; all processes have to."""
        return self.model

    def model_sources(self) -> list[TensorSource] | None:
        """The weights to write to a model's folder where the model does not hold them; all processes have to."""
        return None

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state.tensors["model"], strict=not self.model.adapters)
        restore_optimizer(self.optimizer, self.model, state.tensors["optimizer"])
        if self.ema is not None:
            self.ema.restore(state.tensors["ema"], state.values["ema_updates"])

    def non_finite_weights(self) -> list[str]:
        """The names of weights that are not finite."""
        return [name for name, weight in self.model.named_parameters() if not bool(torch.isfinite(weight).all())]

    @property
    def varied_batches(self) -> bool:
        """Whether nearly every batch has another shape, as those of sources and targets have."""
        return self.objective.varied_batches or self.model.config.shape == "encoder-decoder"

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as the recipe says; without cuDNN's attention where every batch has another shape.

        For each new shape cuDNN plans its attention anew, which takes longer than a step.
        """
        kernels = sdpa_kernel(cudnn.OTHER_BACKENDS) if self.varied_batches else nullcontext()
        with autocast(self.recipe, self.device), kernels:
            yield

    def seed(self, step: int, part: int) -> None:
        """Seed the generators that dropout draws from."""
        seed = derive_seed(self.recipe.train.seed, step, part)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, and takes longer
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 where a recipe says so; "auto" is on a GPU.

    >>> with autocast(Recipe(), torch.device("cpu")):
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision_name(recipe, device) != "float32")


def precision_name(recipe: Recipe, device: torch.device) -> str:
    """The precision of a recipe's matrix products on a device.

    >>> precision_name(Recipe(), torch.device("cpu"))
    'float32'
    """
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    return automatic if recipe.train.precision == "auto" else recipe.train.precision


def compiles_blocks(recipe: Recipe, device: torch.device) -> bool:
    """Whether a recipe compiles the model's blocks on a device.

    >>> compiles_blocks(Recipe(), torch.device("cpu"))
    False
    """
    return device.type == "cuda" if recipe.train.compile is None else recipe.train.compile


def derive_seed(*numbers: int) -> int:
    """A seed of 63 bits from some integers; others give another seed.

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def gradient_of(weight: Tensor) -> Tensor:
    """A weight's gradient; zeros where the batch did not reach it, as an expert that got no token."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def checkpoint_blocks(model: Transformer) -> None:
    """Have every block recompute its activations in the backward pass instead of keeping them."""
    for block in model.blocks():
        setattr(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))  # noqa: B010
