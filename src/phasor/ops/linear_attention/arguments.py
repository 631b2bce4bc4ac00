"""The arguments of linear attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from phasor.config.recurrent import chunk_length


class LinearAttentionArgs(NamedTuple):
    """Queries and keys `[B, K, T, key_dim]`, values `[B, H, T, value_dim]`, gates `[B, H, T]`, a state or none.

    Retention has no strength. `starts` is as `phasor.ops.linear_attention` says.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    strength: Tensor | None
    state: Tensor | None = None
    starts: Tensor | None = None

    @property
    def chunk(self) -> int:
        """The tokens that kernels compute by matrix products, and for which the backward pass keeps one state."""
        dtype = str(self.v.dtype).removeprefix("torch.")
        return chunk_length(self.k.shape[-1], dtype, is_delta=self.strength is not None)
