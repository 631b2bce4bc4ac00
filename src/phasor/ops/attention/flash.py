"""Attention over key intervals as a torch operation: what SDPA cannot do in one call, in one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import intervals
from phasor.ops.attention.bias import DistanceBias, SumBias
from phasor.ops.attention.flash_args import FlashArgs
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.attention.sdpa import PIECES
from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import compute_dtype, must_be_deterministic, needs_grad

MAX_HEAD_DIM = 256


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernel does not support this call; None where it does."""
    reason = dispatch.triton_why_not(q, k, v) or intervals.why_not(mask)
    if reason is not None:
        return reason
    if score_mod.pieces:
        return PIECES
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if score_mod.sink_queries is not None:
        if needs_grad(q, k, v, score_mod.sink_queries.queries):
            return "the distance to sink tokens is capped, for which the kernel has no backward pass"
        if mask.prefix_length is not None or mask.window is None:
            return "the distance to sink tokens is capped, and they are not all of the keys outside of a window"
    if isinstance(score_mod.bias, SumBias):
        return "the bias is a difference of running sums, which the kernel does not have"
    if score_mod.bias is not None and not isinstance(score_mod.bias, DistanceBias):
        return "the bias is not a DistanceBias"
    if score_mod.bias is not None and must_be_deterministic() and needs_grad(score_mod.bias.table):
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
    bias, q_pos, k_pos, shifts = None, score_mod.query_positions, score_mod.key_positions, None
    if isinstance(score_mod.bias, DistanceBias) and q_pos is not None and k_pos is not None:
        bias = score_mod.bias
        if bias.table is not None:
            shifts = mask.prepared.shifts
            shifts = intervals.shifts(mask, q_pos, k_pos) if shifts is None else shifts
    sinks = score_mod.sink_queries
    bounds = mask.prepared.bounds
    bounds = intervals.intervals(mask, queries, keys, q.device) if bounds is None else bounds
    out, _ = interval_attention(
        q,
        k,
        v,
        bounds,
        mask.prepared.query_ranges,
        mask.key_mask,
        None if bias is None or q_pos is None else q_pos.contiguous(),
        None if bias is None or k_pos is None else k_pos.contiguous(),
        shifts,
        None if bias is None else bias.slopes,
        None if bias is None else bias.rates,
        None if bias is None else bias.powers,
        None if bias is None else bias.table,
        score_mod.sink_logits,
        None if sinks is None else sinks.queries.to(q.dtype),
        None if sinks is None else sinks.positions,
        0 if bias is None else bias.min_distance,
        score_mod.scale,
        score_mod.softcap or 0.0,
    )
    return out


@custom_op("phasor::interval_attention")
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    ranges: Tensor | None,
    key_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    rates: Tensor | None,
    powers: Tensor | None,
    table: Tensor | None,
    sink_logits: Tensor | None,
    sink_queries: Tensor | None,
    sink_positions: Tensor | None,
    min_distance: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`.

    `bounds` and `shifts` are what the functions of that name in `intervals` give; `key_mask` is False for padding.
    `ranges` are the queries that the backward pass visits for each block of keys; where it is None, that finds them.
    Where there are `sink_queries` and their positions, they replace queries and positions for the second interval of
    keys; they have no backward pass.
    """
    from phasor.ops.attention import flash_launch

    return flash_launch.forward(
        FlashArgs(
            q, k, v, bounds, ranges, key_mask, query_positions, key_positions, shifts, slopes, rates, powers, table,
            sink_logits, sink_queries, sink_positions, min_distance, scale, softcap,
        )
    )  # fmt: skip


@interval_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _width = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (rows, heads, queries), dtype=torch.float32
    )


@custom_op("phasor::interval_attention_backward")
def interval_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    ranges: Tensor | None,
    key_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    rates: Tensor | None,
    powers: Tensor | None,
    table: Tensor | None,
    sink_logits: Tensor | None,
    min_distance: int,
    scale: float,
    softcap: float,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, then where they need one of a bias table, of slopes with what bends
    their curve, `[2, H]`, and of sink logits; else empty.
    """
    from phasor.ops.attention import flash_launch

    args = FlashArgs(
        q, k, v, bounds, ranges, key_mask, query_positions, key_positions, shifts, slopes, rates, powers, table,
        sink_logits, None, None, min_distance, scale, softcap,
    )  # fmt: skip
    return flash_launch.backward(grad, out, lse, args, bias_needs_grad)


@interval_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    table, sink_logits, bias_needs_grad = rest[9], rest[10], rest[14]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    distances = len(table) if bias_needs_grad and table is not None else 0
    heads = q.shape[2]
    return (
        *grads,
        q.new_empty((distances, heads), dtype=torch.float32),
        q.new_empty((2 if bias_needs_grad and table is None else 0, heads), dtype=torch.float32),
        q.new_empty((0 if sink_logits is None else heads,), dtype=torch.float32),
    )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the tensors and numbers that the backward pass needs."""
    ctx.save_for_backward(*output, *inputs[:14])
    ctx.scalars = inputs[16:]
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of `interval_attention`."""
    out, lse, *inputs = ctx.saved_tensors
    slopes, rates, powers, table, sink_logits = inputs[9:14]
    needed = ctx.needs_input_grad[9:13]
    dq, dk, dv, dtable, dcurve, dsinks = interval_attention_backward(grad, out, lse, *inputs, *ctx.scalars, any(needed))
    dslopes, dbends = dcurve if len(dcurve) else (None, None)
    pairs = zip(needed, (dslopes, dbends, dbends, dtable), (slopes, rates, powers, table), strict=True)
    dbias = [d.to(x.dtype) if need else None for need, d, x in pairs]
    dsinks = None if sink_logits is None else dsinks.to(sink_logits.dtype)
    return dq, dk, dv, *(None,) * 6, *dbias, dsinks, *(None,) * 5


interval_attention.register_autograd(backward, setup_context=setup_context)
