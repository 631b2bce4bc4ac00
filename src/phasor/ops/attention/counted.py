"""Attention with a bias of counted keys, by Triton kernels.

Of its last keys on, a query counts towards those before them, until it has counted to the last vector of the table. The
bias of all that are left is the product with that vector. So there are two sets of keys: near ones, for which kernels
hold gates and their running sums, and far ones, which attention over key intervals takes, with one number for each
query added to all of its scores. The results are put together by the weights that both sets have in the softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phasor.ops import dispatch
from phasor.ops.attention import flash, intervals
from phasor.ops.attention.combine import combine
from phasor.ops.attention.count_bias import CountBias
from phasor.ops.attention.counted_args import NearArgs, padded_rows
from phasor.ops.attention.flash_args import FlashArgs
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import compute_dtype, must_be_deterministic, needs_grad
from phasor.ops.launch import empty_dense

LOG2E = math.log2(math.e)
MAX_ROWS = 1026  # each of which has a product with every query


def counted_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernels for counted keys are not launched; None where they are."""
    bias = score_mod.bias
    if not isinstance(bias, CountBias):
        return "no keys are counted"
    if q.shape[1] == 1:
        return "one query needs no tiles of queries"
    reason = dispatch.triton_why_not(q, k, v) or intervals.intervals_unsupported_reason(mask)
    if reason is not None:
        return reason
    if bias.q is not q or bias.k is not k or bias.scale != score_mod.scale:
        return "keys are counted by other queries or keys than those of attention"
    if not mask.aligned:
        return "keys are counted, and may have another order than their tokens"
    if mask.window is not None and (mask.sink_tokens or mask.prefix_length is not None):
        return "keys are counted, and a query may see two intervals of them"
    if len(bias.table) > MAX_ROWS:
        return f"keys are counted to more than {MAX_ROWS - 1:,}"
    if score_mod.sink_queries is not None or score_mod.pieces or score_mod.relative_values is not None:
        return "keys are counted, and positions act on more than the bias"
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if must_be_deterministic() and needs_grad(v, *bias.learned):
        return "gradients by keys and counts are summed in any order, and deterministic algorithms are asked for"
    return flash.unsupported_heads(q, k, v)


def counted_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`."""
    bias = score_mod.bias
    assert isinstance(bias, CountBias)
    rows, kv_heads = len(q), k.shape[2]
    bounds = mask.prepared.bounds
    bounds = intervals.intervals(mask, q.shape[1], k.shape[1], q.device) if bounds is None else bounds
    # Heads differ in which keys are near: those that share keys are heads, and the others are rows of a batch.
    q, k, v = (by_kv_head(x.to(compute_dtype(x)), kv_heads) for x in (q, k, v))
    bounds = bounds.expand(rows, -1, -1).repeat_interleave(kv_heads, 0)
    key_mask = None if mask.key_mask is None else mask.key_mask.expand(rows, -1).repeat_interleave(kv_heads, 0)
    sinks = score_mod.sink_logits
    sinks = None if sinks is None else sinks.view(kv_heads, -1).repeat(rows, 1)
    scale, softcap = score_mod.scale, score_mod.softcap or 0.0
    by_row, of_last, ends = count_keys(q, k, bias.table.to(q.dtype), bounds, key_mask, scale)
    starts = ends.amin(1)
    args = NearArgs(q, k, v, by_row, starts, ends, bounds, key_mask, sinks, len(bias.table), scale, softcap)
    near = near_attention(args)
    far_bounds = torch.stack((bounds[:, 0], bounds[:, 1].minimum(starts - 1)), dim=1)
    far, far_lse, _ = flash.interval_attention(
        FlashArgs(q, k, v, far_bounds, key_mask=key_mask, scale=scale, softcap=softcap)
    )
    y, _ = combine(*near, far, far_lse + of_last * LOG2E)
    return y.view(rows, kv_heads, *y.shape[1:]).transpose(1, 2).flatten(2, 3)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, T, H, D]` as `[B K, T, H / K, D]`.

    >>> by_kv_head(torch.zeros(2, 5, 6, 4), 3).shape
    torch.Size([6, 5, 2, 4])
    """
    rows, count, heads, head_dim = x.shape
    by_head = x.reshape(rows, count, kv_heads, heads // kv_heads, head_dim)
    return by_head.transpose(1, 2).flatten(0, 1)


@custom_op("phasor::count_keys")
def count_keys(
    q: Tensor, k: Tensor, table: Tensor, bounds: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of queries with the rows of a table, float32 `[B, H, Tq, padded_rows]`, and again with the last one.

    Then int32 `[B, H, Tq]`: all keys that a query sees before that one have the largest count.
    """
    from phasor.ops.attention import counted_launch

    by_row, ends = counted_launch.count(q, k, table, bounds, key_mask, scale)
    return by_row, by_row[..., len(table) - 1].contiguous(), ends


@count_keys.register_fake
def _(
    q: Tensor, k: Tensor, table: Tensor, bounds: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, heads, _ = q.shape
    shape = (rows, heads, queries)
    by_row = q.new_empty((*shape, padded_rows(table)), dtype=torch.float32)
    return by_row, q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int32)


def setup_count(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs.q, inputs.table)
    ctx.scale = inputs.scale
    ctx.set_materialize_grads(False)


def count_backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    """The gradients of queries and of the table through their products; gates have theirs by `near_attention`."""
    q, table = ctx.saved_tensors
    rows, queries, heads, _ = q.shape
    last = len(table) - 1
    if grad is None:
        grad = q.new_zeros((rows, heads, queries, padded_rows(table)), dtype=torch.float32)
    # In one pass, but for gradients that have derivatives.
    out = None if torch.is_grad_enabled() else empty_dense(grad, q.dtype)
    own = torch.mul(grad, ctx.scale, out=out).to(q.dtype)
    if grad_last is not None:
        own[..., last] = (grad[..., last] + grad_last) * ctx.scale
    dq = own @ pad(table, (0, 0, 0, own.shape[-1] - len(table)))
    dtable = (own.mT @ q.transpose(1, 2)).sum((0, 1), dtype=torch.float32)[: last + 1]
    return {"q": dq.transpose(1, 2), "table": dtable.to(table.dtype)}


count_keys.register_autograd(count_backward, setup_context=setup_count)


@custom_op("phasor::near_attention")
def near_attention(args: NearArgs) -> tuple[Tensor, Tensor]:
    """Outputs of attention to near keys, `[B, Tq, H, D]`, and the logsumexp of its scores to base 2, float32
    `[B, H, Tq]`.
    """
    from phasor.ops.attention import counted_launch

    return counted_launch.forward(args)


@near_attention.register_fake
def _(args: NearArgs) -> tuple[Tensor, Tensor]:
    return empty_dense(args.q), torch.empty_like(args.ends, dtype=torch.float32)


@custom_op("phasor::near_attention_backward")
def near_attention_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: NearArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of products with the rows of the table, and of sink logits."""
    from phasor.ops.attention import counted_launch

    return counted_launch.backward(grad, grad_lse, out, lse, args)


@near_attention_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: NearArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty((0, 0) if args.sink_logits is None else args.sink_logits.shape)
    return empty_dense(args.q), empty_dense(args.k), empty_dense(args.v), torch.empty_like(args.by_row), dsinks


def setup_near(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    save_record(ctx, inputs.args, *output)
    ctx.set_materialize_grads(False)


def near_backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor | None]:
    args, out, lse = saved_record(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, dby_row, dsinks = near_attention_backward(grad, grad_lse, out, lse, args)
    dsinks = None if args.sink_logits is None else dsinks.to(args.sink_logits.dtype)
    return {"q": dq, "k": dk, "v": dv, "by_row": dby_row, "sink_logits": dsinks}


near_attention.register_autograd(near_backward, setup_context=setup_near)
