"""One update after another: gradients, whether they are finite, and the optimiser's step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.generation import evaluating
from phasor.model import Block, Transformer
from phasor.training.loss import cross_entropy, forward, loss_of
from phasor.training.optimiser import EMA, averaged, build_optimiser, optimiser_tensors, restore_optimiser
from phasor.training.state import State


@dataclass(frozen=True)
class Update:
    """What came of an update; where `wrong` names tensors that are not finite, no weight was changed."""

    loss: float
    norm: float
    rate: float
    wrong: tuple[str, ...] = ()


class Trainer:
    """A model and everything that changes with its updates.

    What is random in an update is drawn from generators that are set from the recipe's seed and the update's number,
    so an update depends on nothing but the weights, the optimiser's state, the batches and that number.
    """

    def __init__(self, model: Transformer, recipe: Recipe, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        self.device = device_of(recipe.train.device)
        self.model = model.to(self.device).train()
        if recipe.train.checkpoint_activations:
            checkpoint_blocks(self.model)
        self.compiled: Any = torch.compile(self.model) if recipe.train.compile else self.model
        self.optimiser = build_optimiser(self.model, recipe.optimiser)
        self.weights = [weight for group in self.optimiser.param_groups for weight in group["params"]]
        self.ema = None if recipe.train.ema is None else EMA(self.model, recipe.train.ema)

    def gradients(self, step: int, batches: Sequence[Batch], count: float) -> Tensor:
        """Loss and norm of the gradients of an update, `[2]`, on the device; the host does not wait for them.

        `count` is the number of tokens predicted in all the batches, each of which weighs as much as it has.
        """
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part, batch in enumerate(batches):
            self.seed(step, part)
            with self.autocast():
                loss, _ = loss_of(self.compiled, batch, self.recipe)
            if len(batches) > 1:
                loss = loss * (batch.weights.sum() / max(count, 1.0))
            loss.backward()
            total += loss.detach()
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        return torch.stack([total, torch.nn.utils.get_total_norm(gradients)])

    def apply(self, step: int, measured: Tensor) -> Update:
        """Change the weights by the gradients, clipped, unless anything about them is not finite."""
        loss, norm = measured.tolist()
        rate = self.recipe.schedule.rate_at(step, self.steps, self.recipe.optimiser.rate)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            wrong = [] if math.isfinite(loss) else ["the loss"]
            wrong += [f"the gradient of {n}" for n in not_finite((n, w.grad) for n, w in self.model.named_parameters())]
            return Update(loss, norm, rate, tuple(wrong) or ("the norm of all gradients",))
        if self.recipe.train.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.weights, self.recipe.train.clip, measured[1])
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        if self.ema is not None:
            self.ema.update(self.model)
        return Update(loss, norm, rate)

    @torch.no_grad()
    def validation(self, batches: Iterable[Batch], stopped: Callable[[], bool]) -> float | None:
        """The mean cross-entropy of batches, by the averaged weights where there are any; None if stopped midway."""
        total = count = 0.0
        with evaluating(self.model), averaged(self.model, self.ema):
            for batch in batches:
                if stopped():
                    return None
                here = batch.to(self.device)
                with self.autocast():
                    logits = forward(self.compiled, here)
                weight = batch.count
                total += float(cross_entropy(logits, here.targets, here.weights)) * weight
                count += weight
        return total / count if count else math.nan

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors to save, in groups."""
        groups = {"model": self.model.state_dict(), "optimiser": optimiser_tensors(self.optimiser, self.model)}
        return groups if self.ema is None else groups | {"ema": self.ema.weights}

    def restore(self, state: State) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state.tensors["model"])
        restore_optimiser(self.optimiser, self.model, state.tensors["optimiser"])
        if self.ema is not None:
            self.ema.restore(state.tensors["ema"], state.numbers["ema_updates"])

    def not_finite(self) -> list[str]:
        """The names of weights that are not finite."""
        return not_finite(self.model.named_parameters())

    def autocast(self) -> torch.autocast:
        """Matrix products in bfloat16 where the recipe says so."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.train.precision == "bfloat16")

    def seed(self, step: int, part: int) -> None:
        """Set the generators that dropout draws from."""
        number = seed_of(self.recipe.train.seed, step, part)
        torch.default_generator.manual_seed(number)  # torch.manual_seed asks every kind of device, and takes longer
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits out of some numbers; other numbers give another one.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    return [name for name, tensor in named if tensor is not None and not bool(torch.isfinite(tensor).all())]


def checkpoint_blocks(model: Transformer) -> None:
    """Have every block compute its activations again in the backward pass instead of keeping them."""
    for part in model.modules():
        if isinstance(part, Block):
            setattr(part, "forward", partial(checkpoint, part.forward, use_reentrant=False))  # noqa: B010


def device_of(name: str) -> torch.device:
    """The device a recipe names; "auto" is a GPU where there is one.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"train.device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
