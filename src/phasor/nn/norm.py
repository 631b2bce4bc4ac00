"""Norms, computed in at least float32 whatever the dtype of the activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phasor.config import LayerNormConfig, NoNormConfig, NormConfig, RMSNormConfig
from phasor.ops.norm import add_norm, norm


class Norm(nn.Module):
    """A norm over the last dimension."""

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` and its norm."""
        total = x + residual
        return total, self(total)


class NoNorm(Norm):
    """The identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class LayerNorm(Norm):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension."""

    def __init__(self, shape: tuple[int, ...], config: LayerNormConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(shape)) if config.weight else None
        self.bias = nn.Parameter(torch.zeros(shape)) if config.bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, eps=self.eps, centered=True)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, self.weight, self.bias, eps=self.eps, centered=True)


class RMSNorm(Norm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; with a unit offset, `* (1 + weight)`."""

    def __init__(self, shape: tuple[int, ...], config: RMSNormConfig) -> None:
        super().__init__()
        self.eps, self.offset = config.eps, 1.0 if config.unit_offset else 0.0
        self.weight = nn.Parameter(torch.full(shape, 1.0 - self.offset))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, None, eps=self.eps, offset=self.offset)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, self.weight, None, eps=self.eps, offset=self.offset)


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it has that dtype."""
    return x if x.dtype == torch.float64 else x.float()


def build_norm(config: NormConfig, *shape: int) -> Norm:
    """A norm over the last dimension, with weights of the given shape.

    >>> build_norm(RMSNormConfig(), 8)(torch.full((8,), 3.0)).round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if isinstance(config, LayerNormConfig):
        return LayerNorm(shape, config)
    if isinstance(config, RMSNormConfig):
        return RMSNorm(shape, config)
    if isinstance(config, NoNormConfig):
        return NoNorm()
    raise ValueError(f"no module implements the norm {config.kind!r}")
