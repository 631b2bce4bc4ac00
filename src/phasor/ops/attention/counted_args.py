"""What the kernels of attention to near keys with a bias of counted keys are called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NearArgs(NamedTuple):
    """Queries `[B, Tq, H, D]`, keys and values `[B, Tk, K, D]`, which keys a query sees, and what changes scores.

    `by_row` are the products of queries with the `num_rows` vectors of counts, float32 `[B, H, Tq, padded_rows]`. Keys
    before `starts`, int32 `[B, Tq]`, are not near. Those before `ends`, `[B, H, Tq]`, have the largest count. `bounds`
    are those of `intervals`, `key_mask` is False for padding, and `sink_logits` are `[B, H]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    by_row: Tensor
    starts: Tensor
    ends: Tensor
    bounds: Tensor
    key_mask: Tensor | None
    sink_logits: Tensor | None
    num_rows: int
    scale: float
    softcap: float


def padded_rows(table: Tensor) -> int:
    """The number of rows of a table, up to where the next row of products is aligned.

    >>> import torch
    >>> padded_rows(torch.empty(65, 16))
    72
    """
    return -(-len(table) // 8) * 8
