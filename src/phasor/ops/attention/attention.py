"""Exact attention under a rule, without ever holding a mask or bias of queries by keys.

`attention` takes torch's fused kernel in one call where the rule allows it, and otherwise goes over the
queries in blocks: each block looks only at the keys its rule can reach, and builds only its own mask and
bias. While training, a block's mask is made again in the backward pass instead of being kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from phasor.ops.attention import cudnn, flash, large
from phasor.ops.attention.bias import Bias
from phasor.ops.attention.mask import Mask, full

BLOCK = 512  # queries at a time


@dataclass(frozen=True)
class SinkQueries:
    """The queries `[B, Tq, H, D]` and their positions `[B or 1, Tq]` as sink tokens meet them."""

    queries: Tensor
    positions: Tensor


@dataclass(slots=True)
class ScoreMod:
    """How scores are made from queries and keys, apart from who sees whom.

    `bias` gives what to add for query and key positions, `softcap` bounds the scaled scores smoothly, and
    `sinks` (a logit per head) takes part in the softmax without having a value. `capped` gives other queries and
    query positions to be used with sink tokens, whose distance they cap.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    capped: SinkQueries | None = None
    dropout: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether torch's fused kernel can make these scores."""
        return self.softcap is None and self.sinks is None

    def bias_of(self, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor | None:
        """The bias between queries and keys given by index, `[B or 1, H, queries, keys]`."""
        if self.bias is None or self.query_positions is None or self.key_positions is None:
            return None
        true = self.bias(self.query_positions[:, queries], self.key_positions[:, keys])
        if self.capped is None:
            return true
        capped = self.bias(self.capped.positions[:, queries], self.key_positions[:, keys])
        return torch.where(mask.is_sink(keys)[:, None, None, :], capped, true)

    def paired(self, q: Tensor, k: Tensor, queries: slice, keys: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products are the scores: twice as wide where sink tokens meet capped queries."""
        if self.capped is None:
            return q, k
        sink = mask.is_sink(keys)[:, :, None, None]
        wide = torch.cat((k.masked_fill(sink, 0), k.masked_fill(~sink, 0)), dim=-1)
        return torch.cat((q, self.capped.queries[:, queries]), dim=-1), wide


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
    >>> rule = Mask(causal=True, window=3), ScoreMod(scale=0.5)
    >>> torch.allclose(attention(q, k, v, *rule), attention_ref(q, k, v, *rule)[0], atol=1e-6)
    True
    """
    count, keys = q.shape[1], k.shape[1]
    one_call = one_call_why_not(count, keys, mask, scoring) is None
    if one_call and mask.sees_all(keys):
        return fused(q, k, v, scoring=scoring, causal=mask.causal and mask.aligned and mask.offset == 0)
    if count > 1 and flash.why_not(q, k, v, mask, scoring) is None:
        return flash.flash(q, k, v, mask, scoring)
    if one_call and mask.only_padding(keys):
        assert mask.key_mask is not None
        return fused(q, k, v, scoring=scoring, seen=mask.key_mask[:, None, None, :])
    if one_call:
        return fused(q, k, v, scoring=scoring, seen=mask.row(k))
    if count <= BLOCK:
        return attend_block(q, k, v, mask, scoring, 0, count)
    training = differentiated(q, k, v)
    blocks = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        if training:
            part = checkpoint(attend_block, q, k, v, mask, scoring, start, stop, use_reentrant=False)
        else:
            part = attend_block(q, k, v, mask, scoring, start, stop)
        blocks.append(part)
    return torch.cat(blocks, dim=1)


def one_call_why_not(queries: int, keys: int, mask: Mask, scoring: ScoreMod) -> str | None:
    """Why so many queries and keys are not one call of torch's fused attention; None where they are.

    >>> one_call_why_not(8, 8, Mask(causal=True), ScoreMod(scale=1.0)) is None
    True
    >>> one_call_why_not(8, 8, Mask(causal=True, window=3), ScoreMod(scale=1.0))
    "a window hides keys, and torch's fused attention has no window"
    """
    if scoring.softcap is not None:
        return "the scores are soft-capped, and torch's fused attention has no soft-cap"
    if scoring.sinks is not None:
        return "sink logits take part in the softmax, and torch's fused attention has none"
    if scoring.bias is not None:
        return "the positions add a bias to the scores, which would be a whole matrix of queries by keys"
    if scoring.capped is not None:
        return "the distance to sink tokens is capped, so that they meet other queries"
    if queries == 1 or mask.only_padding(keys):
        return None
    if mask.window is not None and mask.window < keys:
        return "a window hides keys, and torch's fused attention has no window"
    if not mask.sees_all(keys):
        return "a prefix, padding, documents or a cache's slots hide keys, which takes a mask of queries by keys"
    return None if mask.offset == 0 else "the queries follow those in a cache, which takes a mask of queries by keys"


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: ScoreMod, start: int, stop: int) -> Tensor:
    """Attention of the queries `start` to `stop`, over the keys they can reach."""
    ranges = mask.key_ranges(start, stop, k.shape[1])
    queries = torch.arange(start, stop, device=q.device)
    keys = torch.cat([torch.arange(a, b, device=q.device) for a, b in ranges])
    k, v = (
        torch.cat([x[:, a:b] for a, b in ranges], dim=1) if len(ranges) > 1 else x[:, slice(*ranges[0])] for x in (k, v)
    )
    seen, bias = mask.block(queries, keys), scoring.bias_of(queries, keys, mask)
    q, k = scoring.paired(q[:, start:stop], k, slice(start, stop), keys, mask)
    if scoring.plain:
        return fused(q, k, v, scoring=scoring, seen=None if seen is None else seen[:, None], bias=bias)
    weights = attention_weights(q, k, seen, bias, scoring)
    return weighted_values(F.dropout(weights, scoring.dropout), v)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scoring: ScoreMod,
    causal: bool = False,
) -> Tensor:
    """torch's fused attention, `seen` and `bias` broadcast to `[B, H, Tq, Tk]`."""
    if large.matters(q) and differentiated(q, k, v, bias):
        if large.exceeds(q, k, v):
            return large.in_halves(partial(fused, scoring=scoring, causal=causal), q, k, v, seen, bias)
        q, k, v = large.dense(q), large.dense(k), large.dense(v)
    if seen is None and bias is None and q.is_cuda:
        q, k, v = (x.to(flash.kind(x)) for x in (q, k, v))
        training = differentiated(q, k, v)
        if cudnn.why_not(q, k, v, scoring.dropout, training, causal) is None:
            return cudnn.attend(q, k, v, scoring.scale, causal, training)
        shared = q.shape[2] // k.shape[2]
        if shared > 1 and q.shape[1] > 1 and q.dtype == torch.float32:
            # No fused kernel shares heads in 32 bits, and torch would hold the scores of all tokens at once.
            k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    mask = seen
    if bias is not None:
        mask = bias.to(q.dtype) if seen is None else bias.masked_fill(~seen, float("-inf")).to(q.dtype)
    if q.shape[1] == 1 and q.shape[2] != k.shape[2]:
        return fused_step(q, k, v, scoring, mask)
    return by_torch(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scoring, causal).transpose(1, 2)


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: ScoreMod, causal: bool = False) -> Tensor:
    """Queries `[B, H, Tq, D]` over keys and values `[B, K, Tk, D]` by the kernel that torch chooses."""
    # Whatever holds is True and not a symbol, as it would be where a compiler takes sizes for dynamic.
    holds = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    options: dict[str, Any] = {name: True for name, value in holds.items() if value}
    options |= {"attn_mask": mask, "dropout_p": scoring.dropout, "scale": scoring.scale}
    if cudnn.misleads(q, k, causal) and differentiated(q, k, v, mask):
        with sdpa_kernel(cudnn.others()):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q, k, v, **options)


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether gradients of what is made of these will be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def fused_step(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod, mask: Tensor | None) -> Tensor:
    """The same for one query: the heads that share a key stand where queries do, and no key is copied for them."""
    groups = k.shape[2]
    if mask is not None and mask.shape[1] > 1:
        mask = mask.squeeze(2).unflatten(1, (groups, -1))
    heads = q.view(q.shape[0], groups, -1, q.shape[-1])
    y = by_torch(heads, k.transpose(1, 2), v.transpose(1, 2), mask, scoring)
    return y.reshape(*q.shape[:-1], v.shape[-1])


def attention_weights(q: Tensor, k: Tensor, seen: Tensor | None, bias: Tensor | None, scoring: ScoreMod) -> Tensor:
    """The softmax of the scores `[B, H, Tq, Tk]`, computed in at least float32."""
    heads = k.shape[2]
    scores = torch.einsum("bqkgd,bskd->bkgqs", q.unflatten(2, (heads, -1)), k).flatten(1, 2) * scoring.scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        # Not -inf: a padding token that sees nothing at all gets some average, and not NaN.
        scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


def weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    """Values `[B, Tk, K, D]` averaged with weights `[B, H, Tq, Tk]`, as `[B, Tq, H, D]`."""
    grouped = weights.unflatten(1, (v.shape[2], -1)).to(v.dtype)
    return torch.einsum("bkgqs,bskd->bqkgd", grouped, v).flatten(2, 3)


def attention_ref(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: ScoreMod) -> tuple[Tensor, Tensor]:
    """The same in plain form: all scores at once. Gives the weights too."""
    queries = torch.arange(q.shape[1], device=q.device)
    keys = torch.arange(k.shape[1], device=q.device)
    seen = full(mask, q.shape[1], k.shape[1], q.device)
    bias = scoring.bias_of(queries, keys, mask)
    q, k = scoring.paired(q, k, slice(None), keys, mask)
    weights = attention_weights(q, k, seen, bias, scoring)
    return weighted_values(F.dropout(weights, scoring.dropout), v), weights
