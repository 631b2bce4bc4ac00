"""Blocks whose products are in float8 while they train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.feed_forward import FeedForward, untouched
from phasor.nn.moe import Experts
from phasor.ops.float8.float8 import (
    FUNCTIONS,
    feedforward_why_not,
    float8_feedforward,
    float8_linear,
    float8_why_not,
)
from phasor.transformer import Block


def float8_blocks(model: nn.Module) -> None:
    """Have the blocks' layers compute their products in float8 while they train; not routers, nor routed experts."""
    for function in FUNCTIONS:
        torch.compiler.allow_in_graph(function)  # Dynamo, looking into them, would not have lengths that vary
    for block in (part for part in model.modules() if isinstance(part, Block)):
        choosing = [layer for part in block.modules() if isinstance(part, Experts) for layer in part.choosing]
        for part in block.modules():
            if type(part) is FeedForward:
                part.__class__ = Float8FeedForward
            elif isinstance(part, nn.Linear) and part not in choosing:
                why = float8_why_not(part.weight)
                if why is not None:
                    raise ValueError(f"train.precision float8: {why}")
                part.__class__ = Float8Linear


class Float8Linear(nn.Linear):
    """A layer whose products are in float8 while it trains."""

    def forward(self, input: Tensor) -> Tensor:
        product = float8_linear if self.training else F.linear
        return product(input, self.weight, self.bias)


class Float8FeedForward(FeedForward):
    """A feed-forward network that is one operation in float8 while it trains, where it is gated and has a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.training
            and self.bare
            and feedforward_why_not(x, self.down.in_features, self.config.activation) is None
        ):
            return float8_feedforward(x, self.up.weight, self.down.weight, self.config.activation)
        return super().forward(x)

    @property
    def bare(self) -> bool:
        """Whether nothing stands between the two layers but the activation."""
        layers = self.up, self.down
        return not self.dropout and all(layer.bias is None and untouched(layer) for layer in layers)
