"""Run workloads one after the other on one device."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from phasor.bench import DEFAULT_WORKLOADS, FULL_WORKLOADS, STUDIES, WORKLOADS, attention, families, llama, rope
from phasor.bench.peers import require
from phasor.bench.report import Report
from phasor.bench.sizes import CPU, FULL, GPU, Sizes
from phasor.bench.timing import Timer, arithmetic, bandwidth
from phasor.bench.workload import Machine, Workload, run_workload
from phasor.config.schema import unknown
from phasor.device import resolve_device


class ProgressCallback(Protocol):
    """Called with what is being run, and how many workloads are done, of how many."""

    def __call__(self, line: str, done: int, total: int) -> None: ...


def measure(
    workloads: Sequence[str] = (),
    *,
    device: str = "auto",
    full: bool = False,
    compile: bool = False,
    sizes: Sizes | None = None,
    family: Sequence[str] = (),
    progress: ProgressCallback = lambda line, done, total: None,
    on_row: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Time workloads on a device, compared with other installed libraries and with the device's limit.

    `full` takes every workload at the published sizes, which needs a large GPU, and `compile` adds compiled variants,
    which are slow to start. `family` names those that the workload "families" takes, all by default. `progress` is
    called before every implementation, `on_row` with the report after every row.

    >>> from phasor.bench.sizes import TINY
    >>> row = measure(["window"], device="cpu", sizes=TINY).rows[0]
    >>> [entry.name for entry in row.entries], row.best > 0
    (['phasor', 'torch SDPA'], True)
    """
    for name in workloads:
        if name not in WORKLOADS:
            raise unknown("workload", name, [*WORKLOADS, *STUDIES])
    if family and "families" not in workloads:
        raise ValueError("--family goes with the workload families: phasor bench families --family NAME")
    if "families" in workloads:
        families.check_families(family)
        require("transformers", "families")
    here = resolve_device(device)
    if full and here.type != "cuda":
        raise ValueError(
            "the full benchmark needs a GPU; without --full its workloads are small enough for this machine"
        )
    names = list(dict.fromkeys(workloads)) or list(FULL_WORKLOADS if full else DEFAULT_WORKLOADS)
    progress("copy and matmul", 0, len(names))
    machine = build_machine(here, sizes or (FULL if full else GPU if here.type == "cuda" else CPU), compile)
    report = Report(
        device=device_name(here),
        dtype=machine.dtype_name,
        versions=versions(),
        bandwidth=machine.bandwidth,
        arithmetic=machine.arithmetic,
        rows=(),
    )
    for done, name in enumerate(names):
        for workload in build_workloads(name, machine, family):
            row = run_workload(workload, machine, partial(progress, done=done, total=len(names)))
            report = replace(report, rows=(*report.rows, row))
            on_row(report)
    progress("done", len(names), len(names))
    return report


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def build_machine(device: torch.device, sizes: Sizes, compiles: bool) -> Machine:
    timer = Timer(device, sizes.repeats, sizes.seconds)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = bandwidth(timer, sizes.copy_bytes), arithmetic(timer, sizes.matmul_size, dtype)
    return Machine(device, dtype, sizes, timer, *rates, compiles)


def build_workloads(name: str, machine: Machine, family: Sequence[str] = ()) -> Iterator[Workload]:
    if name in ("rotary", "positions"):
        yield from rope.workloads(machine, packed=name == "positions")
    elif name == "backward":
        yield llama.backward(machine)
    elif name.startswith("train"):
        yield llama.training(machine, name)
    elif name.startswith("decode"):
        yield llama.decoding(machine, name)
    elif name == "families":
        yield from families.workloads(machine, family)
    else:
        yield attention.workload(machine, name)


def versions() -> dict[str, str]:
    """The versions of the measured packages."""
    found = {"torch": str(torch.__version__)}
    for name in ("triton", "transformers", "liger-kernel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
