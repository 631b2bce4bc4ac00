"""Frequencies of sinusoidal and rotary positions, in 50-digit decimal arithmetic on the host (no torch)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from typing import Any, Literal

PRECISION = Context(prec=50)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")

Spacing = Literal["width", "ends"]


def high_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of decimals with fifty digits, in any decimal context of the caller."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with localcontext(PRECISION):
            return function(*args, **kwargs)

    return run


@high_precision
def geometric_frequencies(base: float | Decimal, dim: int) -> list[Decimal]:
    """`base^(-2i/dim)` for each pair `i`, in radians per position.

    >>> [float(f) for f in geometric_frequencies(10000.0, 4)]
    [1.0, 0.01]
    """
    ratio = Decimal(base) ** (Decimal(-2) / dim)
    return [ratio**i for i in range((dim + 1) // 2)]


@high_precision
def sinusoidal_frequencies(base: float, dim: int, spacing: Spacing) -> list[Decimal]:
    """Frequencies of the sinusoidal table: `base^(-2i/dim)`, or from 1 to exactly 1/base ("ends").

    >>> [float(f) for f in sinusoidal_frequencies(100.0, 6, "ends")]
    [1.0, 0.1, 0.01]
    """
    if spacing == "width":
        return geometric_frequencies(base, dim)
    pairs = dim // 2
    ratio = Decimal(base) ** (Decimal(-1) / (pairs - 1)) if pairs > 1 else Decimal(1)
    return [ratio**i for i in range(pairs)]
