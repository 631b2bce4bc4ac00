"""Arguments of the routing kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CombineArgs(NamedTuple):
    """Rows sorted by expert, `[N top_k, dim]`, that are summed for every token, and with what biases and weights.

    The weights `[N, top_k]` come from the logits `[N, num_experts]`; `rows` says which row each choice of a token is,
    and `ends` where the rows of each expert end.
    """

    x: Tensor
    bias: Tensor | None
    logits: Tensor
    weights: Tensor
    rows: Tensor
    ends: Tensor
    normalize: bool
