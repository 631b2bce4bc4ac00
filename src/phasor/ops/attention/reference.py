"""Attention in readable torch: all scores at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.attention.mask import Mask, dense_mask
from phasor.ops.attention.score_mod import ScoreMod


def attention_ref(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> tuple[Tensor, Tensor]:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`; and the attention weights.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
    >>> y, weights = attention_ref(q, k, v, Mask(causal=True), ScoreMod(scale=0.5))
    >>> tuple(y.shape), tuple(weights.shape)
    ((1, 6, 2, 4), (1, 2, 6, 6))
    """
    queries = torch.arange(q.shape[1], device=q.device)
    keys = torch.arange(k.shape[1], device=q.device)
    visible = dense_mask(mask, q.shape[1], k.shape[1], q.device)
    bias = score_mod.block_bias(queries, keys, mask, q)
    q, k = score_mod.concat_sink_queries(q, k, slice(None), keys, mask)
    weights = attention_weights(q, k, visible, bias, score_mod, score_mod.block_pieces(queries, keys))
    return weighted_values(weights, v, queries, keys, score_mod), weights


def attention_weights(
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    score_mod: ScoreMod,
    pieces: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
) -> Tensor:
    """The softmax of the scores `[B, H, Tq, Tk]`, computed in at least float32.

    What is visible is `[B, Tq, Tk]`, or `[B, H, Tq, Tk]` where heads differ in it. `pieces` are those of
    `ScoreMod.block_pieces`.
    """
    scores = products(q, k)
    for own_q, own_k, applies in pieces:
        scores = torch.where(applies, products(own_q, own_k), scores)
    scores = scores * score_mod.scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if score_mod.softcap is not None:
        scores = score_mod.softcap * torch.tanh(scores / score_mod.softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        # Not -inf: a padding token that sees nothing at all gets some average, and not NaN.
        visible = visible[:, None] if visible.dim() == 3 else visible
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if score_mod.sink_logits is None:
        return scores.softmax(-1)
    sinks = score_mod.sink_logits.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


def products(q: Tensor, k: Tensor) -> Tensor:
    """Inner products of queries `[B, Tq, H, D]` and keys `[B, Tk, K, D]`, `[B, H, Tq, Tk]`."""
    return torch.einsum("bqkgd,bskd->bkgqs", q.unflatten(2, (k.shape[2], -1)), k).flatten(1, 2)


def weighted_values(weights: Tensor, v: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """Values `[B, Tk, K, D]` averaged with weights `[B, H, Tq, Tk]`, some of which are dropped, as `[B, Tq, H, D]`.

    `queries` and `keys` are their indices, by which relative values are found.
    """
    weights = F.dropout(weights, score_mod.dropout)
    grouped = weights.unflatten(1, (v.shape[2], -1)).to(v.dtype)
    y = torch.einsum("bkgqs,bskd->bqkgd", grouped, v).flatten(2, 3)
    return y if score_mod.relative_values is None else y + score_mod.relative_values.block(weights, queries, keys)
