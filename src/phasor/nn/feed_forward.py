"""The feed-forward network: `down(act(up(x)))`, plain or gated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ActivationConfig, FeedForwardConfig, SwiGLUClampedConfig, XIELUConfig
from phasor.nn.adapted_linear import AdaptedLinear
from phasor.nn.hooks import calls_own_forward
from phasor.ops.dispatch import Dispatch, Path, compute_dtype
from phasor.ops.glu import FUSED_GLU_LINEAR, GLU, GLU_ACTIVATIONS, GLU_LINEAR, glu, recompute_why_not


class XIELU(nn.Module):
    """`alpha_p x^2 + beta x` where x > 0, and else `alpha_n (exp(x) - 1 - x) + beta x` (Huang and Schlag, 2024).

    The weights are `softplus^-1(alpha_p)` and `softplus^-1(alpha_n - beta)`, from 0.8 both. `beta`, and `eps`, the
    largest x whose exponential is taken, are constants that a model's files hold.

    >>> [round(y, 4) for y in XIELU()(torch.tensor([-1.0, 2.0])).tolist()]
    [-0.2057, 4.2]
    """

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: Tensor
    eps: Tensor

    def __init__(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        for name in XIELUConfig.weights:
            self.register_parameter(name, nn.Parameter(torch.empty(1, device=device, dtype=dtype)))
        for name in ("beta", "eps"):
            self.register_buffer(name, torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for constant, value in ((self.beta, 0.5), (self.eps, -1e-6), (self.alpha_p, 0.8), (self.alpha_n, 0.8 - 0.5)):
            constant.fill_(math.log(math.expm1(value)) if constant.requires_grad else value)

    def forward(self, x: Tensor) -> Tensor:
        beta = self.beta.to(x.dtype)
        alpha_p, alpha_n = F.softplus(self.alpha_p).to(x.dtype), beta + F.softplus(self.alpha_n).to(x.dtype)
        below = (torch.expm1(torch.minimum(x, self.eps.to(x.dtype))) - x) * alpha_n
        return torch.where(x > 0, alpha_p * x * x, below) + beta * x


ACTIVATIONS_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "xielu": lambda x: XIELU(device=x.device, dtype=x.dtype)(x),
}


def activate(x: Tensor, activation: ActivationConfig) -> Tensor:
    """Apply the activation to the up projection; gated ones take gate and up side by side and halve the width.

    One that learns weights is applied as initialized.

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
        self.activation = XIELU() if isinstance(config.activation, XIELUConfig) else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ACTIVATE_PROJECT(self, self.up(x))
        return y

    def activate_then_project(self, h: Tensor) -> Tensor:
        """The activation of the up projection's output, and its down projection."""
        h = activate(h, self.config.activation) if self.activation is None else self.activation(h)
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

    def adapted_activate_project(self, h: Tensor) -> Tensor:
        """The same where the down projection has an adapter, without the activation being saved for its gradient."""
        return cast(AdaptedLinear, self.down).multiply_with_update(h, self.config.activation.kind)

    def adapted_why_not(self, h: Tensor) -> str | None:
        """Why the activation is saved for an adapter of the down projection; None where it is computed again."""
        down: nn.Module = self.down
        if not isinstance(down, AdaptedLinear) or not calls_own_forward(down):
            return "the down projection has no adapter, or has hooks"
        if self.dropout and self.training:
            return "dropout comes between the activation and the down projection"
        return down.update_why_not(h) or recompute_why_not(h, self.config.activation.kind, compute_dtype(h))


# The activation of the up projection's output and its down projection, asked with the network and that output.
ACTIVATE_PROJECT = Dispatch(
    Path(
        FUSED_GLU_LINEAR.name,
        FeedForward.fused_activate_project,
        FeedForward.unfusable_reason,
        inner=lambda network, h: GLU_LINEAR.explain(h, network.down.weight, network.config.activation.kind),
    ),
    Path(
        "Triton kernel, one operation with the adapted projection",
        FeedForward.adapted_activate_project,
        FeedForward.adapted_why_not,
    ),
    Path(
        "activation, then projection",
        FeedForward.activate_then_project,
        inner=lambda network, h: GLU.explain(h, network.config.activation.kind),
    ),
)
