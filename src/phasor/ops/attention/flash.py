"""Attention over intervals of keys as an operation of torch: what one fused call of torch cannot do, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import intervals
from phasor.ops.attention.bias import DistanceBias
from phasor.ops.attention.mask import Mask
from phasor.ops.custom_op import custom_op

if TYPE_CHECKING:
    from phasor.ops.attention.attention import ScoreMod

WIDEST = 256  # features of a head


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: ScoreMod) -> str | None:
    """Why attention over intervals cannot serve this call; None where it can."""
    stopped = dispatch.triton_why_not(q, k, v) or intervals.why_not(mask)
    if stopped is not None:
        return stopped
    if scoring.dropout > 0:
        return "attention weights are dropped"
    if scoring.capped is not None:
        return "the distance to sink tokens is capped"
    if scoring.bias is not None and not isinstance(scoring.bias, DistanceBias):
        return "the bias is not stated by distance"
    if scoring.bias is not None and scoring.bias.slopes is not None and scoring.bias.slopes.requires_grad:
        return "the slopes of the bias are learned"
    if kind(q) not in dispatch.KERNEL_DTYPES or not kind(q) == kind(k) == kind(v):
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}, and not all of one type up to 32 bits"
    if q.shape[-1] > WIDEST or v.shape[-1] != q.shape[-1]:
        return f"a head has more than {WIDEST} features, or values of another width"
    return None


def kind(x: Tensor) -> torch.dtype:
    """The type a tensor is computed in."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`."""
    q, k, v = (x.to(kind(x)) for x in (q, k, v))
    queries, keys = q.shape[1], k.shape[1]
    bias, query_at, key_at, shifts = None, scoring.query_positions, scoring.key_positions, None
    if isinstance(scoring.bias, DistanceBias) and query_at is not None and key_at is not None:
        bias = scoring.bias
        if bias.table is not None:
            shifts = mask.kept("shifts", (query_at, key_at), intervals.shifts, mask, query_at, key_at)
    bounds = mask.kept("intervals", (queries, keys), intervals.intervals, mask, queries, keys, q.device)
    out, _ = interval_attention(
        q,
        k,
        v,
        bounds,
        mask.key_mask,
        None if bias is None or query_at is None else query_at.contiguous(),
        None if bias is None or key_at is None else key_at.contiguous(),
        shifts,
        None if bias is None else bias.slopes,
        None if bias is None else bias.table,
        scoring.sinks,
        0 if bias is None else bias.lowest,
        scoring.scale,
        scoring.softcap or 0.0,
    )
    return out


@custom_op("phasor::interval_attention")
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    real: Tensor | None,
    query_at: Tensor | None,
    key_at: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    lowest: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the logarithms to base 2 of the softmax's sums, float32 `[B, H, Tq]`.

    `bounds` is what `intervals` gives, `shifts` what `shifts` gives, and `real` is False for padding among the keys.
    """
    from phasor.ops.attention import flash_forward

    told = flash_forward.arguments(
        q, k, v, bounds, real, query_at, key_at, shifts, slopes, table, lowest, scale, softcap
    )
    return flash_forward.forward(sinks, told)


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
    logsumexp: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    real: Tensor | None,
    query_at: Tensor | None,
    key_at: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    lowest: int,
    scale: float,
    softcap: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, of the table where it is learned, and of sink logits; else empty."""
    from phasor.ops.attention import flash_backward, flash_forward

    told = flash_forward.arguments(
        q, k, v, bounds, real, query_at, key_at, shifts, slopes, table, lowest, scale, softcap
    )
    return flash_backward.backward(grad, out, logsumexp, sinks, learned, told)


@interval_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, logsumexp: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    table, sinks, learned = rest[6], rest[7], rest[11]
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    entries = len(table) if learned else 0
    heads = q.shape[2]
    return (
        *made,
        q.new_empty((entries, heads), dtype=torch.float32),
        q.new_empty((0 if sinks is None else heads,), dtype=torch.float32),
    )


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:11])
    ctx.numbers = inputs[11:]
    ctx.mark_non_differentiable(output[1])


def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, logsumexp, *inputs = ctx.saved_tensors
    table, sinks = inputs[9], inputs[10]
    learned = table is not None and ctx.needs_input_grad[9]
    q, k, v, table_grad, sinks_grad = interval_attention_backward(grad, out, logsumexp, *inputs, *ctx.numbers, learned)
    table_grad = table_grad.to(table.dtype) if learned else None
    sinks_grad = None if sinks is None else sinks_grad.to(sinks.dtype)
    return q, k, v, None, None, None, None, None, None, table_grad, sinks_grad, None, None, None


interval_attention.register_autograd(differentiate, setup_context=keep)
