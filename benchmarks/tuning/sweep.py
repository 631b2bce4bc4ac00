"""What the sweeps of kernels' tilings share: they need a GPU, and say which candidate is the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.bench.checks import relative_error
from phasor.bench.study import first_line
from phasor.bench.timing import Timer, bandwidth

DEVICE = torch.device("cuda")
TIMER = Timer(DEVICE, repeats=20, seconds=math.inf)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=scale)


def copy_speed() -> float:
    """Bytes per second of a plain copy, those read and those written."""
    return bandwidth(TIMER, 1 << 31)


def graph_us(body: Callable[[], object], calls: int = 1, repeats: int = 5) -> float:
    """Microseconds of a body in a CUDA graph of `calls` of them, with warm caches."""
    return 1e3 * TIMER.graph_ms(body, repeats, calls, cold=False)


def check(found: Tensor, expected: Tensor, tolerance: float = 1e-2) -> None:
    error = relative_error([found], [expected])
    if not error < tolerance:
        raise ValueError(f"wrong by {error:.1e}")


def rank(
    title: str,
    candidates: Mapping[Any, Callable[[], Any]],
    measure: Callable[[Callable[[], Any]], float],
    unit: str = "ms",
    in_use: Any = None,
    limit: float | None = None,
) -> list[tuple[float, Any]]:
    """Measure every candidate, and print them with the fastest first; one that fails says so in a line."""
    print(f"\n{title}" + ("" if limit is None else f", limit {limit:.4f} {unit}"))
    found = []
    for name, call in candidates.items():
        try:
            found.append((measure(call), name))
        except Exception as error:
            print(f"  {name}: {first_line(error, 120)}", flush=True)
    found.sort(key=lambda pair: pair[0])
    for took, name in found:
        share = "" if limit is None else f" {limit / took:6.1%} of the limit"
        print(f"  {took:10.4f} {unit}{share}  {name}{'  <- in use' if name == in_use else ''}", flush=True)
    return found
