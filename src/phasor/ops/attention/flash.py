"""Attention over key intervals as a torch operation: what SDPA cannot do in one call, in one Triton kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import intervals
from phasor.ops.attention.bias import DistanceBias, SumBias
from phasor.ops.attention.flash_args import FlashArgs
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.attention.sdpa import PIECES, RELATIVE_VALUES
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import compute_dtype, must_be_deterministic, needs_grad
from phasor.ops.launch import empty_dense

MAX_HEAD_DIM = 256
LEARNED = ("slopes", "rates", "powers", "table", "query_zeros", "key_zeros")  # what a bias may get gradients of


def flash_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernel does not support this call; None where it does."""
    reason = dispatch.triton_why_not(q, k, v) or intervals.intervals_unsupported_reason(mask)
    if reason is not None:
        return reason
    if score_mod.pieces and not score_mod.counted:
        return f"{PIECES}, and positions may have any order"
    if score_mod.relative_values is not None:
        return RELATIVE_VALUES
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if score_mod.sink_queries is not None:
        if needs_grad(q, k, v, score_mod.sink_queries.queries):
            return "the distance to sink tokens is capped, for which the kernel has no backward pass"
        if mask.prefix_length is not None or mask.window is None:
            return "the distance to sink tokens is capped, and they are not all of the keys outside of a window"
    if score_mod.bias is not None and not isinstance(score_mod.bias, DistanceBias | SumBias):
        return "the bias is neither a DistanceBias nor a SumBias"
    if isinstance(score_mod.bias, DistanceBias) and must_be_deterministic() and needs_grad(score_mod.bias.table):
        return "the gradient of the bias's table is summed in any order, and deterministic algorithms are asked for"
    return unsupported_heads(q, k, v)


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
    queries, keys = q.shape[1], k.shape[1]
    bias, sums, q_pos, k_pos, shifts = None, None, score_mod.query_positions, score_mod.key_positions, None
    if isinstance(score_mod.bias, SumBias):
        sums = score_mod.bias
        q_pos, k_pos = sums.queries.mT, sums.keys.mT  # [B, H, T]
        bias = DistanceBias(slopes=q.new_full((q.shape[2],), sums.unit, dtype=torch.float32))
    elif isinstance(score_mod.bias, DistanceBias) and q_pos is not None and k_pos is not None:
        bias, shifts = score_mod.bias, mask.prepared.shifts
        shifts = intervals.shifts(mask, q_pos, k_pos) if shifts is None else shifts
    sinks = score_mod.sink_queries
    bounds = mask.prepared.bounds
    bounds = intervals.intervals(mask, queries, keys, q.device) if bounds is None else bounds
    args = FlashArgs(
        q=q,
        k=k,
        v=v,
        bounds=bounds,
        ranges=mask.prepared.query_ranges,
        key_mask=mask.key_mask,
        query_positions=None if bias is None or q_pos is None else q_pos.contiguous(),
        key_positions=None if bias is None or k_pos is None else k_pos.contiguous(),
        query_zeros=None if sums is None else sums.query_zeros,
        key_zeros=None if sums is None else sums.key_zeros,
        shifts=shifts,
        slopes=None if bias is None else bias.slopes,
        rates=None if bias is None else bias.rates,
        powers=None if bias is None else bias.powers,
        table=None if bias is None else bias.table,
        sink_logits=score_mod.sink_logits,
        sink_queries=None if sinks is None else sinks.queries.to(q.dtype),
        sink_positions=None if sinks is None else sinks.positions,
        one_sided=mask.causal and mask.aligned and mask.prefix_length is None,
        min_distance=0 if bias is None else bias.min_distance,
        scale=score_mod.scale,
        softcap=score_mod.softcap or 0.0,
    )
    if not score_mod.pieces:
        out: Tensor = interval_attention(args)[0]
        return out
    return attend_in_pieces(args, mask, score_mod)


def attend_in_pieces(args: FlashArgs, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Attention of each piece to the keys that it is for, put together by the weights that they have in the softmax."""
    queries, keys, near = score_mod.query_positions, score_mod.key_positions, score_mod.near
    assert queries is not None and keys is not None and near is not None  # noqa: PT018
    pieces = [(args.q, args.k, near), *((p.queries, p.keys, p.span) for p in score_mod.pieces)]
    outs, lses = [], []
    for q, k, span in pieces:
        bounds = intervals.restrict(args.bounds, span, mask, queries, keys)
        q, k = q.to(args.q.dtype), k.to(args.k.dtype)
        out, lse = interval_attention(args._replace(q=q, k=k, bounds=bounds, ranges=None))
        outs.append(out)
        lses.append(lse.masked_fill(lse == float("inf"), float("-inf")))  # no key of this piece
        args = args._replace(sink_logits=None)  # which take part once
    weights = (torch.stack(lses) * math.log(2.0)).softmax(0).nan_to_num()  # [pieces, B, H, T]
    y = sum(out * weight.mT[..., None] for out, weight in zip(outs, weights, strict=True))
    assert isinstance(y, Tensor)
    return y.to(args.q.dtype)


@custom_op("phasor::interval_attention")
def interval_attention(args: FlashArgs) -> tuple[Tensor, Tensor]:
    """Outputs, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    from phasor.ops.attention import flash_launch

    return flash_launch.forward(args)


@interval_attention.register_fake
def _(args: FlashArgs) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = args.q.shape
    return empty_dense(args.q), args.q.new_empty((rows, heads, queries), dtype=torch.float32)


@custom_op("phasor::interval_attention_backward")
def interval_attention_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: FlashArgs, bias_needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, then where they need one of a bias table, of slopes with the rates or
    powers of their curve, `[2, H]`, of the sums of queries and of keys, `[B, H, T]`, and of sink logits; else empty.
    """
    from phasor.ops.attention import flash_launch

    return flash_launch.backward(grad, grad_lse, out, lse, args, bias_needs_grad)


@interval_attention_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: FlashArgs, bias_needs_grad: bool
) -> tuple[Tensor, ...]:
    heads, table = args.q.shape[2], args.table
    distances = len(table) if bias_needs_grad and table is not None else 0
    has_sums = args.query_zeros is not None
    curves = 2 if bias_needs_grad and table is None and not has_sums else 0
    rows, summed = args.q.shape[0], heads if bias_needs_grad and has_sums else 0
    return (
        *(empty_dense(x) for x in (args.q, args.k, args.v)),
        lse.new_empty((distances, heads)),
        lse.new_empty((curves, heads)),
        lse.new_empty((rows, summed, args.q.shape[1])),
        lse.new_empty((rows, summed, args.k.shape[1])),
        lse.new_empty((0 if args.sink_logits is None else heads,)),
    )


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    """Keep the arguments and results, which the backward pass needs."""
    save_record(ctx, inputs.args, *output)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor | None]:
    """The gradients of all inputs of `interval_attention` that have one."""
    args, out, lse = saved_record(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    of_bias = [name for name in LEARNED if interval_attention.needs_grad(ctx, name)]
    dq, dk, dv, dtable, dcurve, dq_sums, dk_sums, dsinks = interval_attention_backward(
        grad, grad_lse, out, lse, args, bool(of_bias)
    )
    dslopes, dparams = dcurve if len(dcurve) else (None, None)
    grads = {"slopes": dslopes, "rates": dparams, "powers": dparams, "table": dtable}
    grads |= {"query_zeros": dq_sums.mT, "key_zeros": dk_sums.mT}
    dbias = {name: grads[name].to(getattr(args, name).dtype) for name in of_bias}
    dsinks = None if args.sink_logits is None else dsinks.to(args.sink_logits.dtype)
    return {"q": dq, "k": dk, "v": dv, "sink_logits": dsinks, **dbias}


interval_attention.register_autograd(backward, setup_context=setup_context)
