"""`measure`: works one after the other, on one machine."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from phasor.bench import SHORT, WORKS, attention, llama, rope
from phasor.bench.report import Report
from phasor.bench.sizes import CPU, FULL, GPU, Sizes
from phasor.bench.timing import Timer, arithmetic, bandwidth
from phasor.bench.trial import Machine, Work, measured
from phasor.config.schema import unknown
from phasor.device import resolve_device


class Telling(Protocol):
    """Hears what is being done, and how many works are behind and in all."""

    def __call__(self, line: str, done: int, total: int) -> None: ...


def measure(
    works: Sequence[str] = (),
    *,
    device: str = "auto",
    full: bool = False,
    compile: bool = False,
    sizes: Sizes | None = None,
    told: Telling = lambda line, done, total: None,
    found: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Time works on a device, beside whatever else is installed and beside the device's limit.

    `full` takes every work at the sizes that benchmarks are published for, which needs a large GPU, and `compile` adds
    compiled forms, which are slow to begin. `told` hears what is being done, and `found` gets the report after every
    row.

    >>> from phasor.bench.sizes import TINY
    >>> row = measure(["window"], device="cpu", sizes=TINY).rows[0]
    >>> [entry.who for entry in row.entries], row.best > 0
    (['phasor', 'torch SDPA'], True)
    """
    for name in works:
        if name not in WORKS:
            raise unknown("work", name, WORKS)
    here = resolve_device(device)
    if full and here.type != "cuda":
        raise ValueError("the full benchmark needs a GPU; without --full its works are small enough for this machine")
    names = list(dict.fromkeys(works)) or list(WORKS if full else SHORT)
    told("copy and matrix product", 0, len(names))
    machine = machine_of(here, sizes or (FULL if full else GPU if here.type == "cuda" else CPU), compile)
    report = Report(
        device=torch.cuda.get_device_name(here) if machine.on_gpu else f"{platform.machine()} CPU",
        dtype=machine.dtype_name,
        versions=versions(),
        bandwidth=machine.bandwidth,
        arithmetic=machine.arithmetic,
        rows=(),
    )
    for done, name in enumerate(names):
        for work in works_of(name, machine):
            row = measured(work, machine, partial(told, done=done, total=len(names)))
            report = replace(report, rows=(*report.rows, row))
            found(report)
    told("done", len(names), len(names))
    return report


def machine_of(device: torch.device, sizes: Sizes, compiles: bool) -> Machine:
    timer = Timer(device, sizes.repeats, sizes.seconds)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = bandwidth(timer, sizes.copied), arithmetic(timer, sizes.multiplied, dtype)
    return Machine(device, dtype, sizes, timer, *rates, compiles)


def works_of(name: str, machine: Machine) -> Iterator[Work]:
    if name in ("rotary", "positions"):
        yield from rope.works(machine, packed=name == "positions")
    elif name.startswith("train"):
        yield llama.training(machine, name)
    elif name.startswith("decode"):
        yield llama.decoding(machine, name)
    else:
        yield attention.work(machine, name)


def versions() -> dict[str, str]:
    """The versions of whatever was measured."""
    found = {"torch": str(torch.__version__)}
    for name in ("triton", "transformers", "liger-kernel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
