"""What the kernels of attention over key intervals are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FlashArgs(NamedTuple):
    """Queries `[B, Tq, H, D]`, keys and values `[B, Tk, K, D]`, which keys a query sees, and what changes scores.

    `bounds` and `shifts` are what the functions of that name in `intervals` give; `key_mask` is False for padding.
    `ranges` are the queries that the backward pass visits for each block of keys; where it is None, that finds them.
    Positions, `[B or 1, T]`, are given where there is a bias by distance: a table, or slopes with rates or powers. Sums
    of heads, `[B, H, T]`, take their place; their gradients go through `query_zeros` and `key_zeros`, `[B, T, H]`.
    Where there are `knots`, `[knots]`, the table is of lines: slope and offset by turns, `[2 (knots + 1), H]`, of a
    distance's `log2(1 + rate distance)` times `inverse_spans`, `[B or 1, Tq]`.
    A table may have a row for each query, `[B, H, Tq, distances]`. With `sum_weights` the attention weights are summed
    by its entries too; no two keys that a query sees have the same one then, but for the first and the last.
    `one_sided` says that no query sees keys after it, and `positions_count` that positions count the tokens of each
    document, so that shifts are never `NON_CONTIGUOUS`.

    Where there are `sink_queries` and their positions, they replace queries and positions for the second interval of
    keys; they have no backward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    ranges: Tensor | None = None
    key_mask: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    query_zeros: Tensor | None = None
    key_zeros: Tensor | None = None
    shifts: Tensor | None = None
    slopes: Tensor | None = None
    rates: Tensor | None = None
    powers: Tensor | None = None
    table: Tensor | None = None
    inverse_spans: Tensor | None = None
    knots: Tensor | None = None
    sink_logits: Tensor | None = None
    sink_queries: Tensor | None = None
    sink_positions: Tensor | None = None
    one_sided: bool = False
    positions_count: bool = False
    min_distance: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    sum_weights: bool = False


def output_dtype(args: FlashArgs) -> torch.dtype:
    """That of queries, or float32 with lines: the gradients of a network would show what outputs round away."""
    return args.q.dtype if args.knots is None else torch.float32


class FlashLayout(NamedTuple):
    """All that the grids and scalars of the kernels depend on: sizes, strides and options."""

    q_shape: Sequence[int]
    q_strides: Sequence[int]
    k_shape: Sequence[int]
    k_strides: Sequence[int]
    v_strides: Sequence[int]
    two_intervals: bool
    row_strides: tuple[int, ...]  # of bounds, positions of queries and of keys, shifts, and inverse spans
    head_strides: tuple[int, int]  # of positions of queries and of keys, where they are sums; else 0
    has_key_mask: bool
    bias: int
    num_knots: int
    num_distances: int
    one_sided: bool
    min_distance: int
    use_rows: bool
    sum_weights: bool
    scale: float
    softcap: float


class BiasNeeds(NamedTuple):
    """Which parts of a bias need gradients: a table or lines, slopes with the parameter of their curve, or sums."""

    table: bool
    curve: bool
    sums: bool


class FlashGradients(NamedTuple):
    """What the backward kernels give: gradients of queries, keys and values, and by parts those of the bias.

    Those of a table are `[B, H, parts, distances]`, those of slopes and of the parameter of their curve
    `[B, H, parts, 2]`, and those of the sums of queries and of keys `[B, H, T]`; empty where they are not needed.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dtable: Tensor
    dcurve: Tensor
    dq_sums: Tensor
    dk_sums: Tensor
