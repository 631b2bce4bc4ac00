"""Launches of the kernels of attention over key intervals: the forward kernel, and the two of the backward pass.

In the backward pass weights are recomputed from the scores and the logsumexp kept from the forward pass. One kernel
goes by blocks of queries, the other by blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phasor.ops.attention import flash_hopper
from phasor.ops.attention.flash_args import BiasNeeds, FlashArgs, FlashGradients, FlashLayout, output_dtype
from phasor.ops.attention.flash_dkdv_kernel import dkdv_kernel
from phasor.ops.attention.flash_dq_kernel import delta_kernel, dq_kernel
from phasor.ops.attention.flash_forward_kernel import forward_kernel
from phasor.ops.attention.flash_sums import split_sums
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    LOG,
    LOG2E,
    NO_BIAS,
    POWER,
    SUMS,
    TABLE,
    Tiling,
    block_d,
    tiling,
)
from phasor.ops.attention.intervals import query_ranges
from phasor.ops.launch import KernelLauncher, cdiv, contiguous, empty_dense, next_power_of_2

Launch = tuple[tuple[int, ...], dict[str, Any]]  # the grid, and by name the scalars and options


def flash_layout(args: FlashArgs) -> FlashLayout:
    """The layout of what `for_kernels` gives."""
    q, k, v, table = args.q, args.k, args.v, args.table
    curve = LOG if args.rates is not None else POWER if args.powers is not None else LINEAR
    curve = SUMS if head_stride(args.query_positions) else curve
    of_table = TABLE if args.knots is None else LINES
    bias = NO_BIAS if args.query_positions is None else curve if table is None else of_table
    by_row = args.bounds, args.query_positions, args.key_positions, args.shifts, args.inverse_spans
    heads = head_stride(args.query_positions), head_stride(args.key_positions)
    return FlashLayout(
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), args.bounds.shape[1] == 4,
        tuple(map(row_stride, by_row)), heads, args.key_mask is not None, bias.value,
        0 if args.knots is None else len(args.knots), 0 if table is None else table.shape[-1],
        args.one_sided and bias in (LINEAR, SUMS), args.min_distance,
        table is not None and table.dim() == 4, args.sum_weights,
        args.scale, args.softcap,
    )  # fmt: skip


def shared_scalars(layout: FlashLayout, tiles: Tiling) -> dict[str, Any]:
    """The arguments that all kernels share, and the options of a launch."""
    _, queries, heads, head_dim = layout.q_shape
    _, keys, kv_heads, _ = layout.k_shape
    stride_bounds, stride_q_pos, stride_k_pos, stride_shifts, stride_spans = layout.row_strides
    return {
        "num_queries": queries, "num_keys": keys, "num_heads": heads, "group_size": heads // kv_heads,
        "min_distance": layout.min_distance, "num_distances": layout.num_distances, "scale": float(layout.scale),
        "softcap": float(layout.softcap), **token_strides("q", layout.q_strides),
        **token_strides("k", layout.k_strides), **token_strides("v", layout.v_strides),
        "stride_boundsb": stride_bounds, "stride_qposb": stride_q_pos, "stride_kposb": stride_k_pos,
        "stride_qposh": layout.head_strides[0], "stride_kposh": layout.head_strides[1],
        "stride_shiftsb": stride_shifts, "stride_spansb": stride_spans, "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim), "BIAS": layout.bias, "NUM_KNOTS": layout.num_knots,
        "ONE_SIDED": layout.one_sided, "USE_ROWS": layout.use_rows, "HAS_WEIGHTS": layout.sum_weights,
        "HAS_SOFTCAP": layout.softcap > 0, "TWO_INTERVALS": layout.two_intervals, "HAS_KEY_MASK": layout.has_key_mask,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }  # fmt: skip


def prepare_forward(
    layout: FlashLayout, tiles: Tiling, stride_sinkposb: int, has_sinks: bool, has_sink_queries: bool
) -> Launch:
    rows, queries, heads, _ = layout.q_shape
    flags = {"stride_sinkposb": stride_sinkposb, "HAS_SINKS": has_sinks, "HAS_SINK_QUERIES": has_sink_queries}
    return (cdiv(queries, tiles.block_m) * heads * rows,), shared_scalars(layout, tiles) | flags


def prepare_delta(shape: Sequence[int], grad_strides: Sequence[int]) -> Launch:
    rows, queries, heads, head_dim = shape
    total, per_program = rows * queries * heads, max(1, 4096 // block_d(head_dim))
    sizes = {"num_queries": queries, "num_heads": heads, "rows": total, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(head_dim), "BLOCK_M": per_program}
    return (cdiv(total, per_program),), sizes | token_strides("do", grad_strides)


def prepare_dq(
    layout: FlashLayout,
    tiles: Tiling,
    grad_strides: Sequence[int],
    table_needs_grad: bool,
    curve_needs_grad: bool,
    sums_need_grad: bool,
) -> Launch:
    rows, queries, heads, _ = layout.q_shape
    flags = {"HAS_TABLE_GRAD": table_needs_grad, "HAS_CURVE_GRAD": curve_needs_grad, "HAS_SUM_GRAD": sums_need_grad}
    flags |= {"ONE_SIDED": layout.one_sided and not curve_needs_grad}  # whose gradient needs distances
    scalars = shared_scalars(layout, tiles) | token_strides("do", grad_strides) | flags
    return (cdiv(queries, tiles.block_m) * heads * rows,), scalars


def prepare_dkdv(
    layout: FlashLayout,
    tiles: Tiling,
    grad_strides: Sequence[int],
    stride_rangesb: int,
    stride_dsums: int,
    sums_need_grad: bool,
) -> Launch:
    rows, keys, kv_heads, _ = layout.k_shape
    flags = {"stride_dsums": stride_dsums, "HAS_SUM_GRAD": sums_need_grad}
    flags |= {"stride_rangesb": stride_rangesb}
    scalars = shared_scalars(layout, tiles) | token_strides("do", grad_strides) | flags
    return (cdiv(keys, tiles.block_n) * kv_heads * rows,), scalars


launch_forward = KernelLauncher(forward_kernel, prepare_forward)
launch_delta = KernelLauncher(delta_kernel, prepare_delta)
launch_dq = KernelLauncher(dq_kernel, prepare_dq)
launch_dkdv = KernelLauncher(dkdv_kernel, prepare_dkdv)


def token_strides(name: str, strides: Sequence[int]) -> dict[str, int]:
    """The strides of `[B, T, H, D]`, whose features are contiguous."""
    return dict(zip(stride_names(name), strides, strict=False))  # that of the features has no name


@functools.cache
def stride_names(name: str) -> tuple[str, ...]:
    """The kernels' names of the strides of a tensor's batch, tokens and heads."""
    return tuple(f"stride_{name}{dim}" for dim in "bth")


def row_stride(x: Tensor | None) -> int:
    """The stride between rows; 0 where one row serves the whole batch."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def head_stride(x: Tensor | None) -> int:
    """The stride between heads of `[B, H, 2, T]`; 0 where there are none."""
    return 0 if x is None or x.dim() == 2 else x.stride(1)


def contiguous_features(x: Tensor) -> Tensor:
    """`x`, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def for_kernels(args: FlashArgs) -> FlashArgs:
    """The arguments as kernels read them: contiguous, sums as pairs, biases in float32, tables to base 2 `[H, D]`.

    Knots are a power of two; those that are none are infinite.
    """
    q_pos, k_pos = args.query_positions, args.key_positions
    if q_pos is not None and k_pos is not None and q_pos.dim() == 3:  # sums of each head
        q_pos, k_pos = split_sums(q_pos, k_pos), split_sums(k_pos, k_pos)
    knots, table = args.knots, args.table
    table = table.t() if table is not None and table.dim() == 2 else table
    if knots is not None:
        knots = pad(knots.float(), (0, next_power_of_2(len(knots)) - len(knots)), value=float("inf"))
    return args._replace(
        query_positions=q_pos,
        key_positions=k_pos,
        q=contiguous_features(args.q),
        k=contiguous_features(args.k),
        v=contiguous_features(args.v),
        key_mask=None if args.key_mask is None else args.key_mask.contiguous().view(torch.uint8),
        slopes=None if args.slopes is None else args.slopes.float().contiguous(),
        rates=None if args.rates is None else args.rates.float().contiguous(),
        powers=None if args.powers is None else args.powers.float().contiguous(),
        table=None if table is None else (table.float() * LOG2E.value).contiguous(),
        inverse_spans=None if args.inverse_spans is None else args.inverse_spans.float().contiguous(),
        knots=knots,
    )


def mask_and_bias(args: FlashArgs) -> dict[str, Tensor | None]:
    """The tensors that all kernels read beside queries, keys and values."""
    return {
        "bounds_ptr": args.bounds, "key_mask_ptr": args.key_mask, "q_pos_ptr": args.query_positions,
        "k_pos_ptr": args.key_positions, "shifts_ptr": args.shifts, "slopes_ptr": args.slopes,
        "curve_params_ptr": args.powers if args.rates is None else args.rates, "table_ptr": args.table,
        "spans_ptr": args.inverse_spans, "knots_ptr": args.knots,
    }  # fmt: skip


def forward(args: FlashArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`.

    Then the weights by entry of the table, `[B, H, Tq, distances]`, or nothing.
    """
    args = for_kernels(args)
    layout = flash_layout(args)
    if flash_hopper.takes(args, layout):
        out, lse = flash_hopper.forward(args, layout)
        return out, lse, lse.new_empty(0)
    q, sink_queries, sink_positions = args.q, args.sink_queries, args.sink_positions
    rows, queries, heads, _ = q.shape
    out = empty_dense(q, output_dtype(args))
    lse = q.new_empty((rows, heads, queries), dtype=torch.float32)
    shape = args.table.shape if args.sum_weights and args.table is not None else (0,)
    weights = lse.new_full(shape, float("-inf"))
    sinks = {"sink_logits_ptr": args.sink_logits, "sink_q_ptr": contiguous(sink_queries)}
    sinks |= {"sink_pos_ptr": contiguous(sink_positions)}
    qkv = {"q_ptr": q, "k_ptr": args.k, "v_ptr": args.v}
    launch_forward(
        q, {**qkv, "out_ptr": out, "lse_ptr": lse, "weights_ptr": weights, **mask_and_bias(args), **sinks},
        layout, tiling("forward", q), row_stride(sink_positions), args.sink_logits is not None,
        sink_queries is not None,
    )  # fmt: skip
    return out, lse, torch.exp2(weights - lse[..., None]) if args.sum_weights else weights


def key_block_ranges(bounds: Tensor, keys: int, q: Tensor) -> Tensor:
    """The queries that the backward pass visits for each of its blocks of keys."""
    return query_ranges(bounds, keys, tiling("dkdv", q).block_n)


def output_dot_gradient(out: Tensor, grad: Tensor, lse: Tensor) -> Tensor:
    """For each query and head the dot product of its output and its output's gradient, `[B, H, Tq]`."""
    delta = torch.empty_like(lse)
    launch_delta(out, {"out_ptr": out, "do_ptr": grad, "delta_ptr": delta}, out.shape, grad.stride())
    return delta


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    weights: Tensor,
    args: FlashArgs,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of a bias table `[distances, H]`, of slopes and of the rates or powers
    of their curve `[2, H]`, of the sums of queries and of keys `[B, H, T]`, and of sink logits `[H]`. Lines have those
    of rates as `[1, H]`, and those of inverse spans in the place of the sums of queries.
    """
    grad_weights = grad_weights if args.sum_weights else None
    args = for_kernels(args)._replace(sum_weights=grad_weights is not None)
    grad = contiguous_features(grad.to(args.q.dtype))
    layout = flash_layout(args)
    delta, dsinks = output_dot_gradient(out, grad, lse), lse.new_empty(0)
    if grad_lse is not None:  # a score's share of the logsumexp is its weight, as of the output
        delta = delta - grad_lse * LOG2E.value
    if grad_weights is not None:
        grad_weights = grad_weights.float().contiguous()
        delta = delta + (grad_weights * weights).sum(-1)
    of_sums = bias_needs_grad and args.query_zeros is not None
    of_table = bias_needs_grad and args.table is not None
    needs = BiasNeeds(of_table, bias_needs_grad and not (of_table or of_sums), of_sums)
    ranges = key_block_ranges(args.bounds, args.k.shape[1], args.q) if args.ranges is None else args.ranges
    if flash_hopper.takes_backward(args, layout, grad, needs):
        found = flash_hopper.backward(args, layout, grad, lse, delta, ranges, needs, grad_lse)
    else:
        found = backward_by_queries_and_keys(args, layout, grad, grad_weights, lse, delta, ranges, needs)
    if args.sink_logits is not None:
        p = torch.exp2(args.sink_logits.float()[:, None] * LOG2E.value - lse)
        dsinks = -(p * delta).sum((0, 2))
    dtable, dcurve = found.dtable, found.dcurve
    if of_table and not layout.use_rows:
        dtable = dtable.sum((0, 2)).t().contiguous()  # as its fake has it
    if of_table and args.knots is not None:
        dcurve = dcurve.sum((0, 2)).t()
    if needs.curve:  # the bias is minus slope times curve
        assert args.slopes is not None
        by_slope, by_param = -dcurve.sum((0, 2)).t()
        dcurve = torch.stack((by_slope, by_param * args.slopes))
    return found.dq, found.dk, found.dv, dtable, dcurve, found.dq_sums, found.dk_sums, dsinks


def backward_by_queries_and_keys(
    args: FlashArgs,
    layout: FlashLayout,
    grad: Tensor,
    grad_weights: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    ranges: Tensor,
    needs: BiasNeeds,
) -> FlashGradients:
    """The gradients by two kernels: one goes by blocks of queries, the other by blocks of keys."""
    q, k, v = args.q, args.k, args.v
    rows, queries, heads, _ = q.shape
    dq, dk, dv = empty_dense(q), empty_dense(k), empty_dense(v)
    tiles, lines_need_grad = tiling("dq", q), needs.table and args.knots is not None
    blocks = cdiv(queries, tiles.block_m)
    dtable, dcurve = lse.new_empty(0, heads), lse.new_empty(0, heads)
    dq_sums = lse.new_empty((rows, heads if needs.sums or lines_need_grad else 0, queries))
    dk_sums = lse.new_zeros((2, rows, heads if needs.sums else 0, k.shape[1]))  # of unmasked and of masked tiles
    if needs.table:
        by = queries if layout.use_rows else blocks
        dtable = torch.zeros(rows, heads, by, layout.num_distances, device=q.device)
    if needs.curve or lines_need_grad:
        dcurve = torch.empty(rows, heads, blocks, 1 if lines_need_grad else 2, device=q.device)
    shared: dict[str, Tensor | None] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": grad, "lse_ptr": lse}
    shared |= {"delta_ptr": delta, "dweights_ptr": grad_weights}
    read, strides = mask_and_bias(args), grad.stride()
    tensors = {**shared, "dq_ptr": dq, "dtable_ptr": dtable, "dcurve_ptr": dcurve, "dsums_ptr": dq_sums, **read}
    launch_dq(q, tensors, layout, tiles, strides, *needs)
    tensors = {**shared, "dk_ptr": dk, "dv_ptr": dv, "dsums_ptr": dk_sums, "ranges_ptr": ranges, **read}
    launch_dkdv(q, tensors, layout, tiling("dkdv", q), strides, row_stride(ranges), dk_sums.stride(0), needs.sums)
    return FlashGradients(dq, dk, dv, dtable, dcurve, dq_sums, dk_sums.sum(0))
