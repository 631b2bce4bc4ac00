"""Norms, computed in at least float32 for activations of any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phasor.config import LayerNormConfig, NoNormConfig, NormConfig, RMSNormConfig
from phasor.nn.hooks import calls_own_forward
from phasor.ops.norm import NormOptions, add_norm, norm, norm_add, norm_add_norm


class Norm(nn.Module):
    """A norm over the last dimension."""

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` and its norm."""
        total = x + residual
        return total, self(total)

    def norm_add(self, x: Tensor, branch: Tensor) -> Tensor:
        """`x + norm(branch)`."""
        total: Tensor = x + self(branch)
        return total

    def norm_add_norm(self, x: Tensor, branch: Tensor, next_norm: Norm) -> tuple[Tensor, Tensor]:
        """`x + norm(branch)`, and the norm `next_norm` of it."""
        return next_norm.add_norm(x, self(branch))


class NoNorm(Norm):
    """The identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class RowNorm(Norm):
    """What is divided by its scale, and multiplied by `offset + weight`; if `centered`, without its mean."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, eps: float, offset: float, centered: bool) -> None:
        super().__init__()
        self.eps, self.offset, self.centered = eps, offset, centered

    def operation_args(self, x: Tensor) -> tuple[Any, ...]:
        """What the dispatch table of norms is asked with."""
        return x, self.weight, self.bias, NormOptions(self.eps, self.offset, self.centered)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, eps=self.eps, offset=self.offset, centered=self.centered)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not calls_own_forward(self):
            return super().add_norm(x, residual)
        return add_norm(x, residual, self.weight, self.bias, eps=self.eps, offset=self.offset, centered=self.centered)

    def norm_add(self, x: Tensor, branch: Tensor) -> Tensor:
        if not calls_own_forward(self):
            return super().norm_add(x, branch)
        return norm_add(x, branch, self.weight, self.bias, eps=self.eps, offset=self.offset, centered=self.centered)

    def norm_add_norm(self, x: Tensor, branch: Tensor, next_norm: Norm) -> tuple[Tensor, Tensor]:
        if not (isinstance(next_norm, RowNorm) and self.fuses_with(next_norm)):
            return super().norm_add_norm(x, branch, next_norm)
        weights = self.weight, self.bias, next_norm.weight, next_norm.bias
        return norm_add_norm(x, branch, *weights, eps=self.eps, offset=self.offset, centered=self.centered)

    def fuses_with(self, other: RowNorm) -> bool:
        """Whether one operation can compute both norms."""
        alike = (self.eps, self.offset, self.centered) == (other.eps, other.offset, other.centered)
        return alike and calls_own_forward(self) and calls_own_forward(other)


class LayerNorm(RowNorm):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, or `* (1 + weight)`, over the last dimension."""

    def __init__(self, shape: tuple[int, ...], config: LayerNormConfig) -> None:
        super().__init__(config.eps, offset=1.0 if config.unit_offset else 0.0, centered=True)
        self.weight = nn.Parameter(torch.full(shape, 1.0 - self.offset)) if config.weight else None
        self.bias = nn.Parameter(torch.zeros(shape)) if config.bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(RowNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; with a unit offset, `* (1 + weight)`."""

    def __init__(self, shape: tuple[int, ...], config: RMSNormConfig) -> None:
        super().__init__(config.eps, offset=1.0 if config.unit_offset else 0.0, centered=False)
        self.weight = nn.Parameter(torch.full(shape, 1.0 - self.offset)) if config.weight else None
        self.bias = None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)


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
