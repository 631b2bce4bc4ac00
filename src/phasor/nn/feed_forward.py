"""The feed-forward network: `down(act(up(x)))`, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ActivationConfig, FeedForwardConfig, SwiGLUClampedConfig
from phasor.ops.glu import GLU_ACTIVATIONS, glu, glu_linear

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(x: Tensor, activation: ActivationConfig) -> Tensor:
    """The activation of the up-projection; gated forms take gate and up side by side and halve the width.

    >>> x = torch.tensor([0.0, 2.0, 3.0, 4.0])
    >>> activate(x, FeedForwardConfig(activation="relu").activation).tolist()
    [0.0, 2.0, 3.0, 4.0]
    >>> activate(x, FeedForwardConfig(activation="reglu").activation).tolist()
    [0.0, 8.0]
    """
    if not activation.gated:
        return PLAIN[activation.kind](x)
    if isinstance(activation, SwiGLUClampedConfig):
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.gain * gate) * (up + 1)
    return glu(x, activation.kind)


def untouched(part: nn.Module) -> bool:
    """Whether to call a part is to call the forward of its class: nobody hooked onto it or put another in its place."""
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    return not hooks and "forward" not in part.__dict__


class FeedForward(nn.Module):
    """`down(act(up(x)))`; gated forms project gate and up together, gate first."""

    def __init__(self, config: FeedForwardConfig, dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(dim, hidden_dim * (2 if config.gated else 1), bias=config.bias)
        self.down = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return glu_linear(self.up(x), self.down.weight, self.config.activation.kind)
        h = activate(self.up(x), self.config.activation)
        if self.dropout and self.training:
            h = F.dropout(h, self.dropout)
        return self.down(h)

    @property
    def plain(self) -> bool:
        """Whether nothing stands between the gate and a plain projection, which are then one operation."""
        down = self.down
        bare = type(down) is nn.Linear and down.bias is None and untouched(down)
        return bare and self.config.activation.kind in GLU_ACTIVATIONS and not (self.dropout and self.training)
