"""Multi-head latent attention: what a token keeps is one latent vector, and one rotated key for all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.nn.adapted import effective_weight
from phasor.nn.attention.base import AttendShapes, Attention, AttentionContext, attend
from phasor.nn.attention.fused import DecodingStep
from phasor.nn.attention.latent.config import LatentAttentionConfig
from phasor.nn.attention.latent.fused import FusedLatent
from phasor.nn.attention.latent.indexer import Index, Indexer, attend_to_chosen, queries_at_once
from phasor.nn.norm import RMSNorm, build_norm
from phasor.nn.positions.base import Position
from phasor.ops.attention import Mask, prepare_mask, takes_narrow_values

Choose = Callable[[Tensor, AttentionContext], Tensor | None]  # the tokens that are attended to; None for all


def choose_all(kept: Tensor, ctx: AttentionContext) -> None:
    """All tokens are attended to."""


class LatentAttention(Attention, config=LatentAttentionConfig):
    """`softmax(q k^T * scale) v` with `k, v = kv_up(latent)`, behind one key that is rotated and shared by all heads.

    For many queries keys and values of all heads are computed from the latent vectors. For a few over a long cache
    `kv_up` is multiplied with the queries and the results instead, which attend to the latent vectors themselves; also
    where an indexer chooses those that a query attends to.
    """

    def __init__(self, config: LatentAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.config, self.sizes = config, config.sizes(model)
        self.num_heads, self.head_dim = model.num_heads, model.head_dim
        self.scale = self.head_dim**-0.5 if config.scale is None else config.scale
        self.dropout = model.dropout.attention
        norm = model.norm if config.norm_eps is None else model.norm.replace(eps=config.norm_eps)
        rope, nope, value, rank = self.sizes
        if config.q_rank is None:
            self.q = nn.Linear(model.dim, self.num_heads * self.head_dim, bias=False)
        else:
            self.q_down = nn.Linear(model.dim, config.q_rank, bias="q_down" in config.bias)
            self.q_norm = build_norm(norm, config.q_rank)
            self.q_up = nn.Linear(config.q_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_down = nn.Linear(model.dim, rope + rank, bias="kv_down" in config.bias)
        self.kv_norm = build_norm(norm, rank)
        self.kv_up = nn.Linear(rank, self.num_heads * (nope + value), bias=False)
        self.out = nn.Linear(self.num_heads * value, model.dim, bias="out" in config.bias)
        own = None if config.shared_index else config.indexer
        self.indexer = None if own is None else Indexer(own, config.q_rank or model.dim, model.dim)

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        shape = x.shape[1], keys, self.head_dim
        return prepare_mask(mask, x, shape, plain_scores=positions is None, positions=positions)

    def attend_shapes(self, queries: int, keys: int) -> AttendShapes | None:
        rope, _, value, rank = self.sizes
        if self.chooses(keys):
            return None
        if self.absorbs(queries, keys):
            return AttendShapes(self.num_heads, rope + rank, 1, rank)
        return AttendShapes(self.num_heads, self.head_dim, self.num_heads, max(self.head_dim, value))

    def score_options(self) -> dict[str, Any]:
        return {"scale": self.scale, "dropout": self.dropout if self.training else 0.0}

    def quantizable(self) -> Iterator[tuple[str, nn.Module]]:
        """All but `kv_up`, whose weight is multiplied with queries too."""
        return ((name, part) for name, part in self.named_children() if name != "kv_up")

    def without_adapters(self) -> Iterator[nn.Module]:
        yield from () if self.indexer is None else (self.indexer,)

    def keep_part(self, index: int, count: int) -> None:
        self.num_heads //= count

    def decode_kernel_why_not(self) -> str | None:
        if self.config.indexer is not None:
            return "an indexer chooses the keys"
        return None if self.config.q_rank is None or isinstance(self.q_norm, RMSNorm) else "queries have no RMS norm"

    def fused_attention(self, step: DecodingStep, scheme: Position, index: int) -> FusedLatent:
        return FusedLatent(self, step)

    def decode_projections(self) -> Iterator[nn.Module]:
        yield from (self.q,) if self.config.q_rank is None else (self.q_down, self.q_up)
        yield from (self.kv_down, self.out)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        ctx = ctx.for_layer(x)
        source = x if self.config.q_rank is None else self.q_norm(self.q_down(x))  # [B, T, q_rank]
        q = (self.q if self.config.q_rank is None else self.q_up)(source)  # [B, T, H * D]
        return self.out(self.attend(q, self.kv_down(x), ctx, partial(self.choose, x, source)))  # [B, T, dim]

    def attend(self, q: Tensor, kv: Tensor, ctx: AttentionContext, choose: Choose = choose_all) -> Tensor:
        """The weighted values of all heads `[B, T, H * value]`, of projected queries and of what `kv_down` gives."""
        q = ctx.position.on_query(q.unflatten(-1, (self.num_heads, self.head_dim)), ctx.prepared)  # [B, T, H, D]
        (kept,) = ctx.step.update(latents=ctx.position.on_key(self.latents(kv), ctx.prepared))  # [B, S, 1, rope + rank]
        chosen = choose(kept, ctx)
        score_mod = ctx.score_mod(**self.score_options())
        if self.config.indexer is not None and chosen is not None:
            block = queries_at_once(self.config.indexer, kept)
            y = self.values(attend_to_chosen(self.absorb(q), kept, self.sizes.rank, chosen, block, ctx, score_mod))
        elif self.absorbs(q.shape[1], kept.shape[1]):
            y = self.values(attend(self.absorb(q), kept, kept[..., self.sizes.rope :], ctx, score_mod))
        else:
            k, v = self.expand(kept)  # [B, S, H, D], [B, S, H, value]
            if not takes_narrow_values(q, k, v, ctx.mask, score_mod):
                v = F.pad(v, (0, max(0, self.head_dim - self.sizes.value)))
            y = attend(q, k, v, ctx, score_mod)[..., : self.sizes.value]  # [B, T, H, value]
        return y.flatten(-2)

    def latents(self, kv: Tensor) -> Tensor:
        """What tokens keep, `[B, T, 1, rope + rank]`, before positions: a key for all heads and a latent vector."""
        key, latent = kv.split((self.sizes.rope, self.sizes.rank), dim=-1)
        return torch.cat((key, self.kv_norm(latent)), dim=-1)[:, :, None]

    def choose(self, x: Tensor, source: Tensor, kept: Tensor, ctx: AttentionContext) -> Tensor | None:
        """The tokens that are attended to, `[B, T, top_k]`; None for all.

        The layer's own indexer chooses them, or that of an earlier layer has.
        """
        config = self.config.indexer
        index: Index | None = None if self.indexer is None else self.indexer(x, source, ctx)
        if config is None or not self.chooses(kept.shape[1]):
            return None
        if index is None:
            assert ctx.step.shared
            return ctx.step.shared[0]
        chosen = index.choose(ctx.mask, queries_at_once(config, kept))
        if ctx.step.shared is not None:
            ctx.step.shared[:] = [chosen]
        return chosen

    def up(self, x: Tensor) -> Tensor:
        """The weight of `kv_up` by heads, `[H, nope + value, rank]`, in the dtype of `x`."""
        return effective_weight(self.kv_up).to(x.dtype).unflatten(0, (self.num_heads, -1))

    def absorb(self, q: Tensor) -> Tensor:
        """Queries `[B, T, H, rope + rank]` for latent vectors, of queries `[B, T, H, D]` for keys."""
        rotated, rest = q.split((self.sizes.rope, self.sizes.nope), dim=-1)
        latent = torch.einsum("bthn,hnr->bthr", rest, self.up(q)[:, : self.sizes.nope])
        return torch.cat((rotated, latent), dim=-1)

    def values(self, y: Tensor) -> Tensor:
        """Weighted values `[B, T, H, value]` of weighted latent vectors `[B, T, H, rank]`."""
        return torch.einsum("bthr,hvr->bthv", y, self.up(y)[:, self.sizes.nope :])

    def expand(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[B, S, H, D]` and values `[B, S, H, value]` of what tokens keep."""
        rope, nope, value, rank = self.sizes
        shared, latent = kept.split((rope, rank), dim=-1)
        up = self.kv_up(latent[:, :, 0]).unflatten(-1, (self.num_heads, nope + value))  # [B, S, H, nope + value]
        rest, v = up.split((nope, value), dim=-1)
        k = torch.cat((shared.expand(-1, -1, self.num_heads, -1), rest), dim=-1)
        return k, v

    def chooses(self, keys: int) -> bool:
        """Whether there are more keys than an indexer chooses."""
        return self.config.indexer is not None and keys > self.config.indexer.top_k

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether attending to latent vectors takes fewer operations than computing the keys and values of heads."""
        _, nope, value, rank = self.sizes
        return queries * rank * (nope + value) + queries * keys * (2 * rank - nope - value) < keys * rank * (
            nope + value
        )
