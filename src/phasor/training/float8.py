"""Blocks that compute their matrix products in float8 while they train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.adapted import change_class
from phasor.nn.block import Block
from phasor.nn.feed_forward import ACTIVATE_PROJECT, FeedForward
from phasor.nn.hooks import calls_own_forward
from phasor.nn.moe import Experts
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.float8 import FLOAT8_MLP, FUSED_FLOAT8_MLP, float8_linear, float8_unsupported_reason
from phasor.ops.float8.float8 import AUTOGRAD_FUNCTIONS
from phasor.ops.glu import GLU_ACTIVATIONS


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
                reason = float8_unsupported_reason(part.weight)
                if reason is not None:
                    raise ValueError(f"train.precision float8: {reason}")
                change_class(part, Float8Linear)


class Float8Linear(nn.Linear):
    """A linear layer that computes in float8 while it trains."""

    def forward(self, input: Tensor) -> Tensor:
        linear = float8_linear if self.training else F.linear
        return linear(input, self.weight, self.bias)


class Float8FeedForward(FeedForward):
    """A feed-forward network that computes in float8 while it trains, as one operation where it is a plain GLU."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = FLOAT8_FEED_FORWARD(self, x)
        return y

    def mlp_args(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, str]:
        """What `float8_mlp` takes."""
        return x, self.up.weight, self.down.weight, self.config.activation.kind

    def mlp_why_not(self, x: Tensor) -> str | None:
        """Why the network is not a gated activation between two projections and nothing else; None where it is."""
        if not self.training:
            return "the network does not train"
        if self.config.activation.kind not in GLU_ACTIVATIONS:
            return "the activation has no kernel"
        layers = self.up, self.down
        bare = not self.dropout and all(layer.bias is None and calls_own_forward(layer) for layer in layers)
        return None if bare else "the network has biases or dropout, or hooks on its layers"

    def explain_layers(self, x: Tensor) -> tuple[str, dict[str, str]]:
        """How the activation between the layers is computed."""
        return ACTIVATE_PROJECT.explain(self, x.new_empty((*x.shape[:-1], self.up.out_features)))


# A feed-forward network in float8, asked with the network and its input.
FLOAT8_FEED_FORWARD = Dispatch(
    Path(
        FUSED_FLOAT8_MLP.name,
        lambda network, x: FLOAT8_MLP(*network.mlp_args(x)),
        Float8FeedForward.mlp_why_not,
        inner=lambda network, x: FLOAT8_MLP.explain(*network.mlp_args(x)),
    ),
    Path("layer by layer", FeedForward.forward, inner=Float8FeedForward.explain_layers),
)
