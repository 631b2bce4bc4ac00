"""The feed-forward network: `down(act(up(x)))`, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ActivationConfig, FeedForwardConfig, SwiGLUClampedConfig
from phasor.ops.glu import GLU_ACTIVATIONS, glu, glu_linear

ACTIVATIONS_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
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


def calls_own_forward(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class alone: it has no hooks, and no forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__


class FeedForward(nn.Module):
    """`down(act(up(x)))`; gated activations project gate and up together, gate first."""

    def __init__(self, config: FeedForwardConfig, dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(dim, hidden_dim * (2 if config.gated else 1), bias=config.bias)
        self.down = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.fuses_glu:
            return glu_linear(self.up(x), self.down.weight, self.config.activation.kind)
        h = activate(self.up(x), self.config.activation)
        if self.dropout and self.training:
            h = F.dropout(h, self.dropout)
        return self.down(h)

    @property
    def fuses_glu(self) -> bool:
        """Whether the gated activation and the down projection can be one operation: nothing acts between them."""
        down = self.down
        plain = type(down) is nn.Linear and down.bias is None and calls_own_forward(down)
        return plain and self.config.activation.kind in GLU_ACTIVATIONS and not (self.dropout and self.training)
