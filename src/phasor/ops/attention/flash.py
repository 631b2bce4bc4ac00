"""Attention over key intervals as a torch operation: what SDPA cannot do in one call, in one Triton kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import flash_products, intervals
from phasor.ops.attention.bias import DistanceBias, SumBias, TokenBias
from phasor.ops.attention.combine import combine
from phasor.ops.attention.fire_bias import FIREBias
from phasor.ops.attention.flash_args import FlashArgs, output_dtype
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.relative import ProductBias, RelativeValues, products_by_row
from phasor.ops.attention.score_mod import ScoreMod, Span
from phasor.ops.attention.sdpa import PIECES, RELATIVE_VALUES
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import compute_dtype, must_be_deterministic, needs_grad
from phasor.ops.launch import empty_dense
from phasor.ops.linear_float32 import linear_float32

MAX_HEAD_DIM = 256
MAX_KNOTS = 1024  # that a kernel holds
MAX_DISTANCES = 1026  # each of which has a product with every query: 1,024, and those beyond on either side
FAR = 4  # with this many keys per distance of a table, those beyond the table are attended to apart
LOG2E = math.log2(math.e)
LEARNED = ("slopes", "rates", "powers", "table", "inverse_spans", "query_zeros", "key_zeros")  # what a bias may learn


def flash_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernel does not support this call; None where it does."""
    reason = dispatch.triton_why_not(q, k, v) or intervals.intervals_unsupported_reason(mask)
    if reason is not None:
        return reason
    if score_mod.pieces and not score_mod.counted:
        return f"{PIECES}, and positions may have any order"
    by_distance = isinstance(score_mod.bias, ProductBias) and score_mod.counted and not score_mod.pieces
    if score_mod.relative_values is not None and not by_distance:
        return f"{RELATIVE_VALUES}, and positions may repeat, or queries have no products by distance"
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if score_mod.sink_queries is not None:
        if needs_grad(q, k, v, score_mod.sink_queries.queries):
            return "the distance to sink tokens is capped, for which the kernel has no backward pass"
        if mask.prefix_length is not None or mask.window is None:
            return "the distance to sink tokens is capped, and they are not all of the keys outside of a window"
    if isinstance(score_mod.bias, TokenBias) and score_mod.bias.by_distance:
        if not few_rows(score_mod.bias, score_mod):
            reason = flash_products.products_why_not(score_mod.bias, q, mask, score_mod)
            if reason is not None:
                return reason
    elif score_mod.bias is not None and not isinstance(score_mod.bias, DistanceBias | SumBias | FIREBias):
        return "the bias is neither a DistanceBias, nor a SumBias, nor a FIREBias, nor products by distance"
    if isinstance(score_mod.bias, FIREBias):
        if score_mod.sink_queries is not None:
            return "the distance to sink tokens is capped, and the bias depends on more than the distance"
        if len(score_mod.bias.up) > MAX_KNOTS:
            return f"the network of the bias has more than {MAX_KNOTS:,} hidden units"
    if isinstance(score_mod.bias, DistanceBias) and must_be_deterministic() and needs_grad(score_mod.bias.table):
        return "the gradient of the bias's table is summed in any order, and deterministic algorithms are asked for"
    return unsupported_heads(q, k, v)


def few_rows(bias: TokenBias, score_mod: ScoreMod) -> bool:
    """Whether the kernels of other tables take products: of queries alone, with vectors of few distances."""
    if not isinstance(bias, ProductBias) or bias.query_table is None or bias.key_table is not None:
        return False
    if bias.rows.bounds is not None or len(bias.query_table) > MAX_DISTANCES or score_mod.sink_queries is not None:
        return False
    return score_mod.counted or not (must_be_deterministic() and needs_grad(*bias.learned))


def unsupported_heads(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why kernels of attention do not support the dtypes or the features of heads; None where they do."""
    dtype = compute_dtype(q)
    if dtype not in dispatch.KERNEL_DTYPES or not dtype == compute_dtype(k) == compute_dtype(v):
        dtypes = " and ".join(", ".join(str(x.dtype)[6:] for x in (q, k, v)).rsplit(", ", 1))
        return f"queries, keys and values are {dtypes}, and not all of one dtype of at most 32 bits"
    if q.shape[-1] > MAX_HEAD_DIM or v.shape[-1] != q.shape[-1]:
        return f"a head has more than {MAX_HEAD_DIM} features, or values with another number of them"
    return None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`."""
    q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
    bias = score_mod.bias
    if isinstance(bias, TokenBias) and bias.by_distance and not few_rows(bias, score_mod):
        return flash_products.attend_with_products(q, k, v, mask, score_mod, bias)
    sinks, bounds = score_mod.sink_queries, mask.prepared.bounds
    args = FlashArgs(
        q=q,
        k=k,
        v=v,
        bounds=intervals.intervals(mask, q.shape[1], k.shape[1], q.device) if bounds is None else bounds,
        ranges=mask.prepared.query_ranges,
        key_mask=mask.key_mask,
        sink_logits=score_mod.sink_logits,
        sink_queries=None if sinks is None else sinks.queries.to(q.dtype),
        sink_positions=None if sinks is None else sinks.positions,
        one_sided=mask.causal and mask.aligned and mask.prefix_length is None,
        positions_count=score_mod.counted and mask.aligned and mask.key_mask is None,
        scale=score_mod.scale,
        softcap=score_mod.softcap or 0.0,
    )
    args = args._replace(**bias_args(q, mask, score_mod))
    if not score_mod.pieces:
        out: Tensor
        values = score_mod.relative_values
        if has_far_keys(args, mask):
            return attend_near_and_far(args, mask, values)
        out, _, weights = interval_attention(args)
        return out.to(q.dtype) if values is None else out + values.average(weights).to(out.dtype)
    return attend_in_pieces(args, mask, score_mod)


def bias_args(q: Tensor, mask: Mask, score_mod: ScoreMod) -> dict[str, Any]:
    """The fields of `FlashArgs` that a bias gives."""
    bias, q_pos, k_pos = score_mod.bias, score_mod.query_positions, score_mod.key_positions
    if isinstance(bias, SumBias):
        positions = {"query_positions": bias.queries.mT.contiguous(), "key_positions": bias.keys.mT.contiguous()}
        slopes = q.new_full((q.shape[2],), bias.unit, dtype=torch.float32)
        return {**positions, "slopes": slopes, "query_zeros": bias.query_zeros, "key_zeros": bias.key_zeros}
    if isinstance(bias, ProductBias):
        q_pos, k_pos = bias.rows.queries, bias.rows.keys
    if bias is None or q_pos is None or k_pos is None:
        return {}
    positions = {"query_positions": q_pos.contiguous(), "key_positions": k_pos.contiguous()}
    if isinstance(bias, ProductBias):
        assert bias.query_table is not None
        with torch.autocast(q.device.type, enabled=False):  # which would round the products
            table = query_rows(bias.q, bias.query_table)
        table = table if bias.scale == 1.0 else table * bias.scale
        own: dict[str, Any] = {
            "table": table,
            "shifts": prepared_shifts(mask, q_pos, k_pos),
            "min_distance": bias.rows.first,
        }
        return {**positions, **own, "sum_weights": score_mod.relative_values is not None}
    if isinstance(bias, FIREBias):
        knots, lines = bias.lines()
        shared = {"knots": knots, "table": lines.flatten(0, 1), "inverse_spans": bias.inverse_spans(q_pos)}
        return {
            **positions,
            **shared,
            "rates": bias.rate.expand(q.shape[2]),
            "shifts": prepared_shifts(mask, q_pos, k_pos),
        }
    assert isinstance(bias, DistanceBias)
    shifts = prepared_shifts(mask, q_pos, k_pos)
    fields = {"slopes": bias.slopes, "rates": bias.rates, "powers": bias.powers, "table": bias.table}
    return {**positions, **fields, "shifts": shifts, "min_distance": bias.min_distance}


def query_rows(q: Tensor, table: Tensor) -> Tensor:
    """Products of `[B, T, H, D]` with every row of a table `[rows, heads, D]` in float32, as `[B, H, T, rows]`."""
    if table.shape[1] == 1:
        return linear_float32(q.transpose(1, 2), table[:, 0].to(q.dtype))
    return products_by_row(q.float(), table.float())


def prepared_shifts(mask: Mask, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """What `intervals.shifts` gives, prepared or not."""
    shifts = mask.prepared.shifts
    return intervals.shifts(mask, query_positions, key_positions) if shifts is None else shifts


def has_far_keys(args: FlashArgs, mask: Mask) -> bool:
    """Whether queries have a row of a table each, and most keys are farther away than all but its last entry."""
    if args.table is None or args.table.dim() != 4 or not (args.one_sided and args.positions_count):
        return False
    far = args.min_distance + args.table.shape[-1] - 1
    return min(args.k.shape[1], mask.window or args.k.shape[1]) >= FAR * max(far, 1)


def attend_near_and_far(args: FlashArgs, mask: Mask, values: RelativeValues | None) -> Tensor:
    """Attention to the keys that have entries of their own in the row of a query, and to those that share the last one.

    That is added to the logsumexp of their scores, so that these need no table.
    """
    queries, keys, table = args.query_positions, args.key_positions, args.table
    assert queries is not None and keys is not None and table is not None  # noqa: PT018
    far = args.min_distance + table.shape[-1] - 1
    spans = Span(None, far - 1), Span(far, None)
    near_bounds, far_bounds = (intervals.restrict(args.bounds, span, mask, queries, keys) for span in spans)
    out, lse, weights = interval_attention(args._replace(bounds=near_bounds, ranges=None))
    plain = args._replace(query_positions=None, key_positions=None, shifts=None, table=None, sum_weights=False)
    out_far, lse_far, _ = interval_attention(plain._replace(bounds=far_bounds, ranges=None, sink_logits=None))
    if values is not None:
        last = values.table[-1].repeat_interleave(args.q.shape[2] // values.table.shape[1], dim=0)  # [H, D]
        out, out_far = out + values.average(weights).to(out.dtype), out_far + last.to(out.dtype)
    together: Tensor = combine(out, lse, out_far, lse_far + table[..., -1] * LOG2E)[0]
    return together.to(args.q.dtype)


def attend_in_pieces(args: FlashArgs, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Attention of each piece to the keys that it is for, put together by the weights that they have in the softmax."""
    queries, keys, near = score_mod.query_positions, score_mod.key_positions, score_mod.near
    assert queries is not None and keys is not None and near is not None  # noqa: PT018
    pieces = [(args.q, args.k, near), *((p.queries, p.keys, p.span) for p in score_mod.pieces)]
    so_far: tuple[Tensor, Tensor] | None = None
    for q, k, span in pieces:
        bounds = intervals.restrict(args.bounds, span, mask, queries, keys)
        q, k = q.to(args.q.dtype), k.to(args.k.dtype)
        out, lse, _ = interval_attention(args._replace(q=q, k=k, bounds=bounds, ranges=None))
        so_far = (out, lse) if so_far is None else combine(*so_far, out, lse)
        args = args._replace(sink_logits=None)  # which take part once
    assert so_far is not None
    return so_far[0].to(args.q.dtype)


@custom_op("phasor::interval_attention")
def interval_attention(args: FlashArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs in their `output_dtype`, the logsumexp of the scores to base 2, float32 `[B, H, Tq]`, and where they are
    asked for the weights by entry of the table, `[B, H, Tq, distances]`.
    """
    from phasor.ops.attention import flash_launch

    return flash_launch.forward(args)


@interval_attention.register_fake
def _(args: FlashArgs) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, heads, _ = args.q.shape
    lse = args.q.new_empty((rows, heads, queries), dtype=torch.float32)
    shape = args.table.shape if args.sum_weights and args.table is not None else (0,)
    return empty_dense(args.q, output_dtype(args)), lse, lse.new_empty(shape)


@custom_op("phasor::interval_attention_backward")
def interval_attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    weights: Tensor,
    args: FlashArgs,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, then where they need one of a bias table, of slopes with the rates or
    powers of their curve, `[2, H]`, of the sums of queries and of keys, `[B, H, T]`, and of sink logits; else empty.

    Lines have those of rates as `[1, H]`, and those of inverse spans in the place of the sums of queries.
    """
    from phasor.ops.attention import flash_launch

    return flash_launch.backward(grad, grad_lse, grad_weights, out, lse, weights, args, bias_needs_grad)


@interval_attention_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    weights: Tensor,
    args: FlashArgs,
    bias_needs_grad: bool,
) -> tuple[Tensor, ...]:
    heads, table = args.q.shape[2], args.table
    distances = len(table) if bias_needs_grad and table is not None else 0
    has_sums, has_lines = args.query_zeros is not None, args.knots is not None
    curves = 0 if has_sums or not bias_needs_grad else 1 if has_lines else 2 if table is None else 0
    rows, summed = args.q.shape[0], heads if bias_needs_grad and has_sums else 0
    of_queries = heads if bias_needs_grad and has_lines else summed
    return (
        *(empty_dense(x) for x in (args.q, args.k, args.v)),
        lse.new_empty(table.shape if table is not None and distances and table.dim() == 4 else (distances, heads)),
        lse.new_empty((curves, heads)),
        lse.new_empty((rows, of_queries, args.q.shape[1])),
        lse.new_empty((rows, summed, args.k.shape[1])),
        lse.new_empty((0 if args.sink_logits is None else heads,)),
    )


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Keep the arguments and results, which the backward pass needs."""
    save_record(ctx, inputs.args, *output)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> dict[str, Tensor | None]:
    """The gradients of all inputs of `interval_attention` that have one."""
    args, *outputs = saved_record(ctx)
    out = outputs[0]
    grad = torch.zeros_like(out) if grad is None else grad
    of_bias = [name for name in LEARNED if interval_attention.needs_grad(ctx, name)]
    dq, dk, dv, dtable, dcurve, dq_sums, dk_sums, dsinks = interval_attention_backward(
        grad, *grads, *outputs, args, bool(of_bias)
    )
    dslopes, dparams = (dcurve[0], dcurve[-1]) if len(dcurve) else (None, None)
    by_name = {"slopes": dslopes, "rates": dparams, "powers": dparams, "table": dtable}
    by_name |= {"query_zeros": dq_sums.mT, "key_zeros": dk_sums.mT}
    if args.inverse_spans is not None:
        by_name["inverse_spans"] = dq_sums.sum(1).sum_to_size(args.inverse_spans.shape)
    dbias = {name: by_name[name].to(getattr(args, name).dtype) for name in of_bias}
    dsinks = None if args.sink_logits is None else dsinks.to(args.sink_logits.dtype)
    return {"q": dq, "k": dk, "v": dv, "sink_logits": dsinks, **dbias}


interval_attention.register_autograd(backward, setup_context=setup_context)
