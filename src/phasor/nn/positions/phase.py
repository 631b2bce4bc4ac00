"""Exact phases: angles as 64-bit fixed-point fractions of a full rotation.

A frequency of `theta` radians per position is stored as `inc = round(theta / (2 pi) * 2^64)`. Then
`position * inc`, wrapping at 2^64, is the phase: full rotations overflow, and the rest is exact to 2^-65 of a
rotation per position. As a signed integer it lies in [-1/2, 1/2) rotations, where float64 loses nothing that
float32 could represent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal

import torch
from torch import Tensor

from phasor.nn.positions.frequencies import PI, high_precision

ROTATION = 1 << 64  # a full rotation


@high_precision
def increment(frequency: Decimal) -> int:
    """Radians per position as a signed 64-bit fraction of a full rotation.

    >>> increment(2 * PI), increment(PI / 2) == 2**62
    (0, True)
    """
    phase = int((frequency / (2 * PI) * ROTATION).to_integral_value(ROUND_HALF_EVEN)) % ROTATION
    return phase - ROTATION if phase >= ROTATION // 2 else phase


def increments(frequencies: Sequence[Decimal]) -> tuple[int, ...]:
    """`increment` of each frequency."""
    return tuple(increment(f) for f in frequencies)


def cos_sin_of(positions: Tensor, increments: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * frequency`, the two int64 tensors broadcast against each other.

    >>> from phasor.nn.positions.frequencies import geometric_frequencies
    >>> inc = torch.tensor(increments(geometric_frequencies(10000.0, 4)))
    >>> cos, sin = cos_sin_of(torch.tensor([[0], [2**36]]), inc)
    >>> cos.shape, bool((cos**2 + sin**2 - 1).abs().max() < 1e-6)
    (torch.Size([2, 2]), True)
    """
    phase = positions * increments
    angle = phase.to(torch.float64) * (2 * math.pi / ROTATION)
    return torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)
