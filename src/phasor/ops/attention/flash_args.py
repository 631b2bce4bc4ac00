"""What the kernels of attention over key intervals are called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FlashArgs(NamedTuple):
    """Queries `[B, Tq, H, D]`, keys and values `[B, Tk, K, D]`, which keys a query sees, and what changes scores.

    `bounds` and `shifts` are what the functions of that name in `intervals` give; `key_mask` is False for padding.
    `ranges` are the queries that the backward pass visits for each block of keys; where it is None, that finds them.
    Positions, `[B or 1, T]`, are given where there is a bias by distance: a table, or slopes with rates or powers. Sums
    of heads, `[B, H, T]`, take their place; their gradients go through `query_zeros` and `key_zeros`, `[B, T, H]`.
    `one_sided` says that no query sees keys after it.

    Where there are `sink_queries` and their positions, they replace queries and positions for the second interval of
    keys; they have no backward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    ranges: Tensor | None
    key_mask: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    query_zeros: Tensor | None
    key_zeros: Tensor | None
    shifts: Tensor | None
    slopes: Tensor | None
    rates: Tensor | None
    powers: Tensor | None
    table: Tensor | None
    sink_logits: Tensor | None
    sink_queries: Tensor | None
    sink_positions: Tensor | None
    one_sided: bool
    min_distance: int
    scale: float
    softcap: float
