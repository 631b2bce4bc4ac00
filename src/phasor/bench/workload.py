"""A workload and its implementations, each checked before it is timed."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phasor.bench.report import Entry, Unit, WorkloadResult, in_unit
from phasor.bench.sizes import Sizes
from phasor.bench.timing import Timer, alternate


@dataclass(frozen=True)
class Machine:
    """The device that workloads run on, their sizes, and the device's peak rates."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    timer: Timer
    bandwidth: float
    arithmetic: float
    compiles: bool  # whether compiled variants are timed too; they are slow to start

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype)[6:]

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """The same random values each time, of order 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class BenchmarkCase:
    """An implementation that is ready to run: `check` gives its error against the reference, `seconds` its time.

    `device_seconds`, where `seconds` is a wall time, is how long a GPU takes where it never waits for the host. `call`
    is what a workload that alternates times. `compile_seconds` compiles with an empty cache, before anything else.
    """

    check: Callable[[], float]
    seconds: Callable[[Timer], float]
    device_seconds: Callable[[], float] | None = None
    call: Callable[[], object] | None = None
    compile_seconds: Callable[[], float] | None = None


Implementation = tuple[str, Callable[[], BenchmarkCase]]


@dataclass(frozen=True)
class Workload:
    """What to compute, the tolerance of a result, and the least time the machine's limits allow."""

    name: str
    title: str
    unit: Unit
    limit: float  # seconds
    limit_basis: str
    tolerance: float
    implementations: list[Implementation]
    tokens: int = 0  # per call, where the unit counts them
    family: str = ""
    part: str = ""
    alternate: bool = False  # time implementations in turn, so that other load on the machine falls on all of them


def run_workload(workload: Workload, machine: Machine, progress: Callable[[str], None]) -> WorkloadResult:
    """One implementation after the other; a failure is noted, and the others go on."""
    if workload.alternate:
        workload = replace(workload, implementations=in_turn(workload, machine))
    entries = []
    for name, prepare in workload.implementations:
        progress(f"{workload.name}: {name}")
        entries.append(run_case(name, prepare, workload, machine))
        torch.compiler.reset()
        gc.collect()
        if machine.on_gpu:
            torch.cuda.empty_cache()
    limit = in_unit(workload.unit, workload.limit, workload.tokens)
    fields = workload.name, workload.title, workload.unit, limit, workload.limit_basis, tuple(entries)
    return WorkloadResult(*fields, workload.family, workload.part)


def in_turn(workload: Workload, machine: Machine) -> list[Implementation]:
    """Implementations whose times are the medians of alternating calls, made when the first of them is timed."""
    cases: dict[str, BenchmarkCase] = {}

    @functools.cache
    def medians() -> dict[str, float]:
        calls = {name: case.call for name, case in cases.items() if case.call is not None}
        times = alternate(calls, max(3, machine.sizes.repeats))
        return {name: statistics.median(values) for name, values in times.items()}

    def in_turn_with_others(name: str) -> BenchmarkCase:
        return replace(cases[name], seconds=lambda timer: medians()[name])

    found: list[Implementation] = []
    for name, prepare in workload.implementations:
        try:
            cases[name] = prepare()
            found.append((name, functools.partial(in_turn_with_others, name)))
        except Exception:  # which is noted when it is prepared again
            found.append((name, prepare))
    return found


def run_case(name: str, prepare: Callable[[], BenchmarkCase], workload: Workload, machine: Machine) -> Entry:
    error = None
    try:
        case = prepare()
        compiled = None if case.compile_seconds is None else case.compile_seconds()
        error = case.check()
        if not error <= workload.tolerance:
            return Entry(name, None, error, note=f"wrong: off by {error:.1e}, and {workload.tolerance:.1e} is allowed")
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats(machine.device)
        value = in_unit(workload.unit, case.seconds(machine.timer), workload.tokens)
        memory = torch.cuda.max_memory_allocated(machine.device) / 2**30 if machine.on_gpu else None
        device = None
        if machine.on_gpu and case.device_seconds is not None:
            device = 1e3 * case.device_seconds()
        return Entry(name, value, error, memory, device=device, compile=compiled)
    except Exception as problem:
        return Entry(
            name, None, error, note=f"failed: {' '.join(str(problem).split())[:200] or type(problem).__name__}"
        )
