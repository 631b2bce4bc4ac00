"""The indexer of latent attention: which tokens a query attends to, and attention to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.latent.config import IndexerConfig
from phasor.nn.norm import build_norm
from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.topk import stable_topk

BLOCK_ELEMENTS = 1 << 24  # of scores, or of chosen latent vectors, that are held at once


class Index(NamedTuple):
    """What tokens are chosen by: queries `[B, T, heads, D]`, weights of heads `[B, T, heads]`, and keys `[B, S, D]`."""

    queries: Tensor
    weights: Tensor
    keys: Tensor
    top_k: int

    def choose(self, mask: Mask, block: int) -> Tensor:
        """The tokens that each query attends to, `[B, T, top_k]`, of a block of queries after the other; -1 for none.

        Of equal scores the first token is chosen. Scores are computed in at least float32.
        """
        count = self.queries.shape[1]
        parts = [self.choose_block(mask, start, min(start + block, count)) for start in range(0, count, block)]
        return torch.cat(parts, dim=1)

    def choose_block(self, mask: Mask, start: int, stop: int) -> Tensor:
        """Those of the queries from `start` to `stop`."""
        q, weights = self.queries[:, start:stop], self.weights[:, start:stop]
        scores = torch.einsum("bths,bth->bts", F.relu(torch.einsum("bthd,bsd->bths", q, self.keys)), weights)
        tokens = torch.arange(start, stop, device=q.device), torch.arange(self.keys.shape[1], device=q.device)
        visible = mask.block(*tokens)  # [B or 1, T, S]
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        values, chosen = stable_topk(scores, self.top_k)
        return torch.where(values > float("-inf"), chosen, -1)


class Indexer(nn.Module):
    """Small heads that choose tokens: one key per token, and queries from the vector that attention's come from."""

    def __init__(self, config: IndexerConfig, q_rank: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.q = nn.Linear(q_rank, config.num_heads * config.head_dim, bias=False)
        self.k = nn.Linear(dim, config.head_dim, bias=False)
        self.k_norm = build_norm(config.norm, config.head_dim)
        self.head_weights = nn.Linear(dim, config.num_heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor, source: Tensor, ctx: AttentionContext) -> Index:
        """What the tokens of this call choose by; their keys are kept."""
        heads, width = self.config.num_heads, self.config.head_dim
        q = ctx.position.on_query(self.q(source).unflatten(-1, (heads, width)), ctx.prepared)
        k = ctx.position.on_key(self.k_norm(self.k(x))[:, :, None], ctx.prepared)
        (keys,) = ctx.step.update(index_keys=k)  # [B, S, 1, D]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        weights = self.head_weights(x).to(dtype) * (heads * width) ** -0.5
        return Index(q.to(dtype), weights, keys[:, :, 0].to(dtype), self.config.top_k)


def queries_at_once(config: IndexerConfig, kept: Tensor) -> int:
    """How many queries a block has, by what is held of each: scores of all keys, or the chosen of `[B, S, 1, D]`."""
    batch, keys, _, width = kept.shape
    return max(1, BLOCK_ELEMENTS // (batch * max(keys * config.num_heads, config.top_k * width)))


def attend_to_chosen(
    q: Tensor, kept: Tensor, rank: int, chosen: Tensor, block: int, ctx: AttentionContext, score_mod: ScoreMod
) -> Tensor:
    """Queries `[B, T, H, D]` over the `chosen` ones of latent vectors `[B, S, 1, D]`: `[B, T, H, rank]`.

    Of all chosen vectors no more than those of a block of queries are held, in the backward pass too.
    """
    kept = kept[:, :, 0]
    batch, keys, width = kept.shape

    def attend(q: Tensor, kept: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(batch, device=q.device)[:, None, None]
        vectors = kept[rows, chosen.clamp(min=0)]  # [B, t, k, D]
        scores = torch.einsum("bthd,btkd->bthk", q, vectors) * score_mod.scale
        scores = scores.masked_fill((chosen < 0)[:, :, None], float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
        dropped = F.dropout(weights, score_mod.dropout, training=score_mod.dropout > 0)
        return torch.einsum("bthk,btkr->bthr", dropped, vectors[..., width - rank :]), weights

    parts = []
    for start in range(0, q.shape[1], block):
        own = chosen[:, start : start + block]
        y, weights = checkpoint(attend, q[:, start : start + block], kept, own, use_reentrant=False)
        parts.append(y)
        if ctx.weights is not None:
            record_weights(ctx.weights, weights, own, keys, start)
    return torch.cat(parts, dim=1)


def record_weights(record: list[Tensor], weights: Tensor, chosen: Tensor, keys: int, start: int) -> None:
    """Add the weights of some queries, `[B, t, H, k]`, to a record of all weights `[B, H, T, S]`."""
    dense = weights.new_zeros(*weights.shape[:3], keys + 1)
    dense.scatter_(-1, torch.where(chosen < 0, keys, chosen)[:, :, None].expand_as(weights), weights)
    rows = dense[..., :keys].transpose(1, 2)  # [B, H, t, S]
    if start == 0:
        record.append(rows)
    else:
        record[-1] = torch.cat((record[-1], rows), dim=2)
