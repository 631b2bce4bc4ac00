"""The feed-forward network: `down(act(up(x)))`, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ActivationConfig, FeedForwardConfig, SwiGLUClampedConfig
from phasor.nn.hooks import calls_own_forward
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.glu import FUSED_GLU_LINEAR, GLU, GLU_ACTIVATIONS, GLU_LINEAR, glu

ACTIVATIONS_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(x: Tensor, activation: ActivationConfig) -> Tensor:
    """Apply the activation to the up projection; gated ones take gate and up side by side and halve the width.

    >>> x = torch.tensor([0.0, 2.0, 3.0, 4.0])
    >>> activate(x, FeedForwardConfig(activation="relu").activation).tolist()
    [0.0, 2.0, 3.0, 4.0]
    >>> activate(x, FeedForwardConfig(activation="reglu").activation).tolist()
    [0.0, 8.0]
    """
    if not activation.gated:
        return ACTIVATIONS_BY_NAME[activation.kind](x)
    if isinstance(activation, SwiGLUClampedConfig):
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.gain * gate) * (up + 1)
    return glu(x, activation.kind)


class FeedForward(nn.Module):
    """`down(act(up(x)))`; gated activations project gate and up together, gate first."""

    def __init__(self, config: FeedForwardConfig, dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(dim, hidden_dim * (2 if config.gated else 1), bias=config.bias)
        self.down = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ACTIVATE_PROJECT(self, self.up(x))
        return y

    def activate_then_project(self, h: Tensor) -> Tensor:
        """The activation of the up projection's output, and its down projection."""
        h = activate(h, self.config.activation)
        if self.dropout and self.training:
            h = F.dropout(h, self.dropout)
        return self.down(h)

    def fused_activate_project(self, h: Tensor) -> Tensor:
        """The same as one operation."""
        y: Tensor = GLU_LINEAR(h, self.down.weight, self.config.activation.kind)
        return y

    def unfusable_reason(self, h: Tensor) -> str | None:
        """Why the activation and the down projection cannot be one operation; None where nothing comes between."""
        down = self.down
        if self.config.activation.kind not in GLU_ACTIVATIONS:
            return "the activation has no kernel"
        if type(down) is not nn.Linear or down.bias is not None or not calls_own_forward(down):
            return "the down projection is not a plain matrix product: it has a bias or hooks, or is not an nn.Linear"
        return (
            "dropout comes between the activation and the down projection" if self.dropout and self.training else None
        )


# The activation of the up projection's output and its down projection, asked with the network and that output.
ACTIVATE_PROJECT = Dispatch(
    Path(
        FUSED_GLU_LINEAR.name,
        FeedForward.fused_activate_project,
        FeedForward.unfusable_reason,
        inner=lambda network, h: GLU_LINEAR.explain(h, network.down.weight, network.config.activation.kind),
    ),
    Path(
        "activation, then projection",
        FeedForward.activate_then_project,
        inner=lambda network, h: GLU.explain(h, network.config.activation.kind),
    ),
)
