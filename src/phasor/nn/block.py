"""A block: attention, cross-attention where there is an encoder, and feed-forward, around the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Layer, Side
from phasor.nn.attention.base import AttentionContext, build_attention
from phasor.nn.feed_forward import FeedForward
from phasor.nn.layer_input import LayerInput
from phasor.nn.moe import Experts
from phasor.nn.record import Record
from phasor.nn.residual import Sublayer, build_residual

RECOMPILE_LIMIT = 128  # graphs of `Block.forward` in a process: blocks of all models are one function to the compiler


class Block(nn.Module):
    """Attention, cross-attention where there is an encoder, feed-forward: joined by the placement's equation.

    Attention or the feed-forward network may be absent.
    """

    def __init__(self, model: ModelConfig, side: Side, layer: Layer, *, first: bool = False) -> None:
        super().__init__()
        crosses = side == "decoder" and model.shape == "encoder-decoder"
        self.attention = build_attention(layer.attention, model)
        self.cross = build_attention(layer.attention, model, cross=True) if crosses else None
        self.attends, network = layer.attention.present, layer.feedforward
        sizes = model.dim, network.hidden_dim_of(model), model.dropout.feedforward
        plain = network.experts is None
        self.feedforward: FeedForward | Experts | None = None
        if network.present:
            self.feedforward = FeedForward(network, *sizes) if plain else Experts(network, *sizes, model.norm)
        count = self.attends + crosses + network.present
        self.residual = build_residual(model, side, count, first, network.branch_norms)
        has_input = model.embedding.per_layer_width is not None
        self.layer_input = LayerInput(model, layer.feedforward.activation) if has_input else None
        self.scale = nn.Parameter(torch.ones(1)) if model.placement.block_scale else None

    def forward(
        self,
        x: Tensor,
        ctx: AttentionContext,
        cross_ctx: AttentionContext | None,
        record: Record,
        layer_input: Tensor | None = None,
    ) -> Tensor:
        x = self.residual(x, *self.sublayers(ctx, cross_ctx, record))
        if self.layer_input is not None:
            x = x + self.layer_input(x, layer_input)
        return x if self.scale is None else x * self.scale.to(x.dtype)

    def sublayers(self, ctx: AttentionContext, cross_ctx: AttentionContext | None, record: Record) -> list[Sublayer]:
        """What runs one after the other around the residual stream, each a function of the stream alone."""
        found: list[Sublayer] = [partial(self.attention, ctx=ctx)] if self.attends else []
        if self.cross is not None:
            found.append(partial(self.cross, ctx=cross_ctx))
        if self.feedforward is not None:
            routed = isinstance(self.feedforward, Experts)
            found.append(partial(self.feedforward, router_logits=record.router) if routed else self.feedforward)
        return found

    def reset_parameters(self) -> None:
        """Initialize what is part of neither a sub-layer nor a norm."""
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def compile(self, *args: Any, **options: Any) -> None:
        """As `Module.compile`, with what the compiler has to know of blocks."""
        set_up_compiler()
        super().compile(*args, **options)


def set_up_compiler() -> None:
    """Set what `torch.compile` has to know before blocks are compiled, which share their graphs.

    Beyond torch's limit of eight graphs per function, blocks would silently run eagerly; and without guards on hooks,
    those inside a block would be those of the block that was compiled first.
    """
    settings = torch.compiler.config
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    torch._dynamo.config.skip_nnmodule_hook_guards = False
