"""Arguments of the decode kernels and of their references: norms and rotary positions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NormArgs(NamedTuple):
    """An RMS norm before a projection: `x / sqrt(mean(x^2) + eps) * (offset + weight)`."""

    weight: Tensor
    offset: float
    eps: float


class QKNormArgs(NamedTuple):
    """RMS norms of queries and keys, with one weight for all heads `[D]` or one per head `[heads, D]`."""

    q_weight: Tensor
    k_weight: Tensor
    offset: float
    eps: float


class RotaryArgs(NamedTuple):
    """Rotary positions: 64-bit phase increments per pair, the attention factor, and how features are paired."""

    increments: Tensor
    factor: float
    rotary_dim: int
    adjacent: bool
