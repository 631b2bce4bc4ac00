"""Blocks that compute their matrix products in float8 while they train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.feed_forward import FeedForward, calls_own_forward
from phasor.nn.moe import Experts
from phasor.ops.float8 import float8_linear, float8_linear_why_not, float8_mlp
from phasor.ops.float8.float8 import AUTOGRAD_FUNCTIONS
from phasor.ops.glu import GLU_ACTIVATIONS
from phasor.transformer import Block


def convert_to_float8(model: nn.Module) -> None:
    """Make the linear layers of blocks compute in float8 while they train, but for routers and routed experts."""
    for function in AUTOGRAD_FUNCTIONS:
        torch.compiler.allow_in_graph(function)  # tracing into them would fix dynamic lengths
    for block in (part for part in model.modules() if isinstance(part, Block)):
        routers = [layer for part in block.modules() if isinstance(part, Experts) for layer in part.routers]
        for part in block.modules():
            if type(part) is FeedForward:
                part.__class__ = Float8FeedForward
            elif isinstance(part, nn.Linear) and part not in routers:
                reason = float8_linear_why_not(part.weight)
                if reason is not None:
                    raise ValueError(f"train.precision float8: {reason}")
                part.__class__ = Float8Linear


class Float8Linear(nn.Linear):
    """A linear layer that computes in float8 while it trains."""

    def forward(self, input: Tensor) -> Tensor:
        linear = float8_linear if self.training else F.linear
        return linear(input, self.weight, self.bias)


class Float8FeedForward(FeedForward):
    """A feed-forward network that computes in float8 while it trains, as one operation where it is a plain GLU."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_plain_glu:
            return float8_mlp(x, self.up.weight, self.down.weight, self.config.activation.kind)
        return super().forward(x)

    @property
    def is_plain_glu(self) -> bool:
        """Whether it is a gated activation between two projections and nothing else: no bias, dropout or hook."""
        layers = self.up, self.down
        bare = not self.dropout and all(layer.bias is None and calls_own_forward(layer) for layer in layers)
        return bare and self.config.activation.kind in GLU_ACTIVATIONS
