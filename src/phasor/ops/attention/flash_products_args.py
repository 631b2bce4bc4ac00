"""What the kernels of attention with products by distance are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class ProductArgs(NamedTuple):
    """Queries `[B, Tq, H, D]`, keys and values `[B, Tk, K, D]`, which keys a query sees, and products that scores have.

    Those are of `bias_q` with a `query_table`, of `bias_k` with a `key_table`, `[distances, heads, D]`, or of both, all
    times `bias_scale`. Row 0 is for `first_distance`; where it is `clipped`, a table has in its first and last row what
    is for all distances beyond too. `query_positions` and `key_positions`, `[B or 1, T]`, are int32 where they count
    tokens, and `shares_entries` says that some queries, padding among them, may have the same distance to a key.
    `first_index` is the index of the first query among the keys, -1 where it is not known. The other fields are as in
    `FlashArgs`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias_q: Tensor
    bias_k: Tensor
    bounds: Tensor
    query_positions: Tensor
    key_positions: Tensor
    ranges: Tensor | None = None
    shifts: Tensor | None = None
    key_mask: Tensor | None = None
    sink_logits: Tensor | None = None
    query_table: Tensor | None = None
    key_table: Tensor | None = None
    first_distance: int = 0
    clipped: bool = False
    shares_entries: bool = False
    first_index: int = -1
    bias_scale: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0


class ProductLayout(NamedTuple):
    """All that the grids and scalars of a launch depend on: sizes, strides and options."""

    from_query: int
    to_query: int
    q_shape: Sequence[int]
    q_strides: Sequence[int]
    k_shape: Sequence[int]
    k_strides: Sequence[int]
    v_strides: Sequence[int]
    row_strides: tuple[int, ...]  # of bounds, positions of queries and of keys, and shifts
    first_distance: int
    num_distances: int
    stride_row: int
    scale: float
    softcap: float
    has_rows: bool
    has_key_rows: bool
    clipped: bool
    two_intervals: bool
    has_key_mask: bool
