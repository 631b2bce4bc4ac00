"""A block: attention, cross-attention where there is an encoder, and feed-forward, around the residual stream."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Layer, Side
from phasor.nn.attention import Attention, AttentionContext
from phasor.nn.feed_forward import FeedForward
from phasor.nn.moe import Experts
from phasor.nn.record import Record
from phasor.nn.replay import Replays
from phasor.nn.residual import build_residual


class Block(nn.Module):
    """Attention, cross-attention where there is an encoder, feed-forward: joined by the placement's equation."""

    def __init__(self, model: ModelConfig, side: Side, layer: Layer, *, first: bool = False) -> None:
        super().__init__()
        crosses = side == "decoder" and model.shape == "encoder-decoder"
        self.attention = Attention(layer.attention, model)
        self.cross = Attention(layer.attention, model, cross=True) if crosses else None
        network = FeedForward if layer.feedforward.experts is None else Experts
        self.feedforward = network(layer.feedforward, model.dim, model.hidden_dim, model.dropout.feedforward)
        self.residual = build_residual(model, side, 3 if crosses else 2, first)
        self.replays = Replays()

    def forward(self, x: Tensor, ctx: AttentionContext, cross_ctx: AttentionContext | None, record: Record) -> Tensor:
        router = record.router  # a list that is an argument would be copied by the hooks of FSDP
        if router is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self.replays(self, self.compute, x, ctx, cross_ctx)
        return self.compute(x, ctx, cross_ctx, router)

    def compute(
        self,
        x: Tensor,
        ctx: AttentionContext,
        cross_ctx: AttentionContext | None,
        router: list[Tensor] | None = None,
    ) -> Tensor:
        """The block's equation, operation by operation."""
        attend = partial(self.attention, ctx=ctx)
        record_router = router is not None and isinstance(self.feedforward, Experts)
        feed_forward = partial(self.feedforward, router_logits=router) if record_router else self.feedforward
        if self.cross is None:
            return self.residual(x, attend, feed_forward)
        return self.residual(x, attend, partial(self.cross, ctx=cross_ctx), feed_forward)
