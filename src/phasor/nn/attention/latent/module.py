"""Multi-head latent attention: what a token keeps is one latent vector, and one rotated key for all heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.nn.attention.base import Attention, AttentionContext, attend
from phasor.nn.attention.latent.config import LatentAttentionConfig
from phasor.nn.norm import build_norm
from phasor.ops.attention import Mask, prepare_mask


class LatentAttention(Attention, config=LatentAttentionConfig):
    """`softmax(q k^T * scale) v` with `k, v = kv_up(latent)`, behind one key that is rotated and shared by all heads.

    For many queries keys and values of all heads are computed from the latent vectors. For a few over a long cache
    `kv_up` is multiplied with the queries and the results instead, which attend to the latent vectors themselves.
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

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        shape = x.shape[1], keys, self.head_dim
        return prepare_mask(mask, x, shape, plain_scores=positions is None, positions=positions)

    def quantizable(self) -> Iterator[tuple[str, nn.Module]]:
        """All but `kv_up`, whose weight is multiplied with queries too."""
        return ((name, part) for name, part in self.named_children() if name != "kv_up")

    def keep_part(self, index: int, count: int) -> None:
        self.num_heads //= count

    def queries(self, x: Tensor) -> Tensor:
        """Queries `[B, T, H, D]` before positions; the first features of each are those that positions may rotate."""
        q = self.q(x) if self.config.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        return q.unflatten(-1, (self.num_heads, self.head_dim))

    def latents(self, x: Tensor) -> Tensor:
        """What tokens keep, `[B, T, 1, rope + rank]`, before positions: a key for all heads and a latent vector."""
        key, latent = self.kv_down(x).split((self.sizes.rope, self.sizes.rank), dim=-1)
        return torch.cat((key, self.kv_norm(latent)), dim=-1)[:, :, None]

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        ctx = ctx.for_layer(x)
        q = ctx.position.on_query(self.queries(x), ctx.prepared)  # [B, T, H, D]
        (kept,) = ctx.step.update(latents=ctx.position.on_key(self.latents(x), ctx.prepared))  # [B, S, 1, rope + rank]
        score_mod = ctx.score_mod(scale=self.scale, dropout=self.dropout if self.training else 0.0)
        if self.absorbs(q.shape[1], kept.shape[1]):
            rope, nope, value, rank = self.sizes
            up = self.kv_up.weight.to(x.dtype).view(-1, nope + value, rank)  # [H, nope + value, rank]
            rotated, rest = q.split((rope, nope), dim=-1)
            q = torch.cat((rotated, torch.einsum("bthn,hnr->bthr", rest, up[:, :nope])), dim=-1)
            y = attend(q, kept, kept[..., rope:], ctx, score_mod)  # [B, T, H, rank]
            y = torch.einsum("bthr,hvr->bthv", y, up[:, nope:])
        else:
            y = attend(q, *self.expand(kept), ctx, score_mod)  # [B, T, H, value]
        return self.out(y.flatten(-2))  # [B, T, dim]

    def expand(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[B, S, H, D]` and values `[B, S, H, value]` of what tokens keep."""
        rope, nope, value, rank = self.sizes
        shared, latent = kept.split((rope, rank), dim=-1)
        up = self.kv_up(latent[:, :, 0]).unflatten(-1, (self.num_heads, nope + value))  # [B, S, H, nope + value]
        rest, v = up.split((nope, value), dim=-1)
        return torch.cat((shared.expand(-1, -1, self.num_heads, -1), rest), dim=-1), v

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether attending to latent vectors takes fewer operations than computing the keys and values of heads."""
        _, nope, value, rank = self.sizes
        return queries * rank * (nope + value) + queries * keys * (2 * rank - nope - value) < keys * rank * (
            nope + value
        )
