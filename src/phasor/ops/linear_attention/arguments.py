"""The arguments of the kernels of linear attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DELTA_CHUNK, RETENTION_CHUNK = 64, 128  # tokens; the delta rule solves a system in each chunk
# Tiles of long chunks with more features of a key, or in float32, do not fit into shared memory.
MAX_KEY_DIM_LONG_CHUNK, LONG_CHUNK_DTYPES = 128, (torch.bfloat16,)


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

    @property
    def chunk(self) -> int:
        """The tokens that kernels compute by matrix products, and for which the backward pass keeps one state."""
        fits = self.v.dtype in LONG_CHUNK_DTYPES and self.k.shape[-1] <= MAX_KEY_DIM_LONG_CHUNK
        return RETENTION_CHUNK if self.strength is None and fits else DELTA_CHUNK
