"""The arguments of the kernels of linear attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearAttentionArgs(NamedTuple):
    """Queries and keys `[B, K, T, key_dim]`, values `[B, H, T, value_dim]`, gates `[B, H, T]`.

    Retention has no strength.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    strength: Tensor | None
    state: Tensor | None
    starts: Tensor | None
