"""Empty results of rotations: queries and keys, the parts of a projection, or a projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phasor.ops.launch import empty_dense


def empty_heads(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]`, of queries with or without a dimension of groups."""
    return q.new_empty((*q.shape[:2], q.shape[2:-1].numel(), q.shape[-1])), empty_dense(k)


def empty_parts(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[B, T, H, D]`, keys and values `[B, T, K, D]` of a projection `[B, T, K, H/K + 2, D]`."""
    rows, tokens, groups, heads, head_dim = qkv.shape
    q, k, v = (qkv.new_empty((rows, tokens, n, head_dim)) for n in (groups * (heads - 2), groups, groups))
    return q, k, v


def empty_qkv(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """A projection `[B, T, K, H/K + 2, D]`, of queries `[B, T, H, D]` and keys."""
    rows, tokens, groups, head_dim = k.shape
    return q.new_empty((rows, tokens, groups, q.shape[2] // groups + 2, head_dim))
