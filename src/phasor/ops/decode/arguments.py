"""Arguments of the decode kernels and of their references: norms, rotary positions, experts, heads with a state."""

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


class ConvolutionArgs(NamedTuple):
    """A causal convolution of some columns of a projection, whose last inputs are kept.

    The columns are in groups of `group`, the first `convolved` of which are channels, activated by silu. `weight` is
    `[C, W]`, `state [slots, W - 1, C]`, of which row `i` has the slot `slots[i]`, or `i` without `slots`.
    """

    weight: Tensor
    bias: Tensor | None
    state: Tensor
    slots: Tensor | None
    group: int
    convolved: int


class HeadNormArgs(NamedTuple):
    """A norm of each head's values, with one weight for all heads `[D]` or one per head `[H, D]`; or none."""

    weight: Tensor | None
    bias: Tensor | None
    offset: float
    eps: float
    centered: bool


class RecurrentArgs(NamedTuple):
    """How heads with a state compute a token: by the delta rule or by retention.

    Of the delta rule, queries and keys are normalized, with `key_eps`; `scaled` queries are divided by the root of
    their width. A state decays by `exp(log_decay [H])`, or by the time that a token projects: its softplus, after
    `time_bias [H]` is added, times `exp(log_rate [H])`. By retention values are written times that time, if there is
    one. Values times `skip [H]` are added to results, which are then normalized and gated.
    """

    key_heads: int
    is_delta: bool
    scaled: bool
    key_eps: float = 0.0
    log_rate: Tensor | None = None
    time_bias: Tensor | None = None
    log_decay: Tensor | None = None
    skip: Tensor | None = None
    norm: HeadNormArgs | None = None
    rope: RotaryArgs | None = None
