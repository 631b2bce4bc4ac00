"""A work to be done by several contenders, each checked before it is timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from phasor.bench.report import Entry, Row, Unit, in_unit
from phasor.bench.sizes import Sizes
from phasor.bench.timing import Timer


@dataclass(frozen=True)
class Machine:
    """Where works are measured, how large they are, and what the device can do at best."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    timer: Timer
    bandwidth: float
    arithmetic: float
    compiles: bool  # whether compiled forms are measured too; they are slow to begin

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype)[6:]

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """The same numbers each time, of order 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Trial:
    """A contender that is ready: `check` gives its error against the reference, `seconds` how long it takes."""

    check: Callable[[], float]
    seconds: Callable[[Timer], float]


Contender = tuple[str, Callable[[], Trial]]


@dataclass(frozen=True)
class Work:
    """What is to be done, how far a result may be off, and how long it must take at least."""

    name: str
    title: str
    unit: Unit
    limit: float  # seconds
    limit_is: str
    tolerance: float
    contenders: list[Contender]
    tokens: int = 0  # done by one call, where the unit counts them


def measured(work: Work, machine: Machine, told: Callable[[str], None]) -> Row:
    """One contender after the other; what one of them cannot do is noted, and the others go on."""
    entries = []
    for who, prepare in work.contenders:
        told(f"{work.name}: {who}")
        entries.append(entry_of(who, prepare, work, machine))
        if machine.compiles:
            torch.compiler.reset()
        gc.collect()
        if machine.on_gpu:
            torch.cuda.empty_cache()
    limit = in_unit(work.unit, work.limit, work.tokens)
    return Row(work.name, work.title, work.unit, limit, work.limit_is, tuple(entries))


def entry_of(who: str, prepare: Callable[[], Trial], work: Work, machine: Machine) -> Entry:
    error = None
    try:
        trial = prepare()
        error = trial.check()
        if not error <= work.tolerance:
            return Entry(who, None, error, note=f"wrong: off by {error:.1e}, and {work.tolerance:.1e} is allowed")
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats(machine.device)
        value = in_unit(work.unit, trial.seconds(machine.timer), work.tokens)
        memory = torch.cuda.max_memory_allocated(machine.device) / 2**30 if machine.on_gpu else None
        return Entry(who, value, error, memory)
    except Exception as problem:
        return Entry(who, None, error, note=f"failed: {' '.join(str(problem).split())[:200] or type(problem).__name__}")


def off(found: Iterable[Tensor], truth: Iterable[Tensor]) -> float:
    """How far tensors are from the truth: the norm of what differs over the norm of the truth; infinite for NaN.

    >>> off([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])])
    0.1
    """
    wrong = size = 0.0
    for one, other in zip(found, truth, strict=True):
        wide = other.detach().double()
        wrong += float((one.detach().double() - wide).square().sum())
        size += float(wide.square().sum())
    error = (wrong / size) ** 0.5
    return error if error == error else float("inf")


def worst_off(found: Iterable[Tensor], truth: Iterable[Tensor], tokens: int) -> float:
    """The same for the token that is furthest off, so that a single wrong one shows; `tokens` is their axis.

    >>> worst_off([torch.tensor([[3.0, 4.0], [3.0, 4.5]])], [torch.tensor([[3.0, 4.0], [3.0, 4.0]])], 0)
    0.1
    """
    worst = 0.0
    for one, other in zip(found, truth, strict=True):
        wide = other.detach().double().movedim(tokens, 0).flatten(1)
        wrong = one.detach().double().movedim(tokens, 0).flatten(1) - wide
        error = float((wrong.norm(dim=1) / wide.norm(dim=1)).max())
        worst = max(worst, error if error == error else float("inf"))
    return worst
