"""Arguments of the decode kernels and of their references: norms, rotary positions and experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The kernels' names for activations, gated or not.
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "gelu": "gelu",
    "gelu-tanh": "gelu-tanh",
    "glu": "sigmoid",
    "reglu": "relu",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu-tanh": "gelu-tanh",
}


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


class ExpertsArgs(NamedTuple):
    """Experts: matrices `[experts, in, out]` with their biases, the activation between them, and the routing.

    With `glu`, gates come before ups. `limit` and `gain` are those of the activation "swiglu-clamped".
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    glu: bool
    top_k: int
    normalize: bool
    limit: float = 0.0
    gain: float = 0.0
