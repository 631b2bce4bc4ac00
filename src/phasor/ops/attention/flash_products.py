"""Attention with products of queries and keys with vectors of any distance, as a torch operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.attention import intervals
from phasor.ops.attention.bias import TokenBias
from phasor.ops.attention.flash_products_args import ProductArgs
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.relative import ProductBias
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import must_be_deterministic, needs_grad
from phasor.ops.launch import empty_dense

LEARNED = ("bias_q", "bias_k", "query_table", "key_table")


def products_why_not(bias: TokenBias, q: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernels do not take a bias that is `by_distance`; None where they do."""
    if score_mod.sink_queries is not None:
        return "the distance to sink tokens is capped, and the bias is of other queries"
    if score_mod.relative_values is not None:
        return "values have vectors of the distance, and its products are of keys, or of many distances"
    learns = needs_grad(q, *bias.learned)
    if learns and not score_mod.counted:
        return "gradients of products are stored by distance, and positions may repeat"
    of_keys = isinstance(bias, ProductBias) and bias.key_table is not None
    if learns and of_keys and shares_entries(mask) and must_be_deterministic():
        return "padding may have the distance of a query, gradients are summed in any order, and that is not allowed"
    return None


def shares_entries(mask: Mask) -> bool:
    """Whether some queries, padding among them, may have the same distance to a key that they see."""
    return mask.key_mask is not None or not mask.aligned


def product_args(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, bias: ProductBias) -> ProductArgs:
    """What the kernels are called with."""
    rows, own = bias.rows, mask.prepared
    least, most = rows.first, rows.reach
    if score_mod.counted:
        least, most = mask.visible_distances(q.shape[1], k.shape[1])
    first = min(max(least, rows.first), rows.reach)
    last = max(min(most, rows.reach), first)
    query_table, key_table = bias.tables(first, last)
    positions = rows.queries, rows.keys
    q_pos, k_pos = (x.to(torch.int32) for x in positions) if score_mod.counted else positions
    return ProductArgs(
        q=q,
        k=k,
        v=v,
        bias_q=bias.q.to(q.dtype),
        bias_k=bias.k.to(q.dtype),
        bounds=intervals.intervals(mask, q.shape[1], k.shape[1], q.device) if own.bounds is None else own.bounds,
        query_positions=q_pos,
        key_positions=k_pos,
        ranges=own.query_ranges,
        shifts=intervals.shifts(mask, *positions) if own.shifts is None else own.shifts,
        key_mask=mask.key_mask,
        sink_logits=score_mod.sink_logits,
        query_table=None if query_table is None else query_table.to(q.dtype),
        key_table=None if key_table is None else key_table.to(q.dtype),
        first_distance=first,
        clipped=not score_mod.counted or least < first or last < most,
        shares_entries=shares_entries(mask),
        first_index=mask.offset if score_mod.counted and mask.aligned and mask.query_index is None else -1,
        bias_scale=bias.scale,
        scale=score_mod.scale,
        softcap=score_mod.softcap or 0.0,
    )


def attend_with_products(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, bias: TokenBias) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`."""
    products = bias.as_products(k)
    assert isinstance(products, ProductBias)
    out: Tensor = product_attention(product_args(q, k, v, mask, score_mod, products))[0]
    return out


@custom_op("phasor::product_attention")
def product_attention(args: ProductArgs) -> tuple[Tensor, Tensor]:
    """Outputs, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    from phasor.ops.attention import flash_products_launch

    return flash_products_launch.forward(args)


@product_attention.register_fake
def _(args: ProductArgs) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = args.q.shape
    return empty_dense(args.q), args.q.new_empty((rows, heads, queries), dtype=torch.float32)


@custom_op("phasor::product_attention_backward")
def product_attention_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: ProductArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, `bias_q`, `bias_k`, both tables and sink logits; empty ones of none."""
    from phasor.ops.attention import flash_products_launch

    return flash_products_launch.backward(grad, grad_lse, out, lse, args)


@product_attention_backward.register_fake
def _(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: ProductArgs) -> tuple[Tensor, ...]:
    products = (args.bias_q, args.query_table), (args.bias_k, args.key_table)
    vectors = (x.new_empty(0 if table is None else x.shape) for x, table in products)
    tables = (lse.new_empty(0 if table is None else table.shape) for _, table in products)
    sinks = lse.new_empty(0 if args.sink_logits is None else args.sink_logits.shape)
    return *(empty_dense(x) for x in (args.q, args.k, args.v)), *vectors, *tables, sinks


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Keep the arguments and results, which the backward pass needs."""
    save_record(ctx, inputs.args, *output)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor | None]:
    """The gradients of all inputs of `product_attention` that have one."""
    args, out, lse = saved_record(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, *rest = product_attention_backward(grad, grad_lse, out, lse, args)
    names = (*LEARNED, "sink_logits")
    found = {name: x for name, x in zip(names, rest, strict=True) if product_attention.needs_grad(ctx, name)}
    own = {name: x.to(getattr(args, name).dtype) for name, x in found.items() if x.numel()}
    return {"q": dq, "k": dk, "v": dv, **own}


product_attention.register_autograd(backward, setup_context=setup_context)
