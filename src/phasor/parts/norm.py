"""Norms, computed in at least float32 whatever the type of the activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import LayerNormConfig, NoNormConfig, NormConfig, RMSNormConfig


class LayerNorm(nn.Module):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis."""

    def __init__(self, shape: tuple[int, ...], config: LayerNormConfig) -> None:
        super().__init__()
        self.eps, self.plain = config.eps, len(shape) == 1
        self.weight = nn.Parameter(torch.ones(shape)) if config.weight else None
        self.bias = nn.Parameter(torch.zeros(shape)) if config.bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1:]
        if self.plain:
            return F.layer_norm(x, width, self.weight, self.bias, self.eps)
        wide = at_least_float32(x)
        y = F.layer_norm(wide, width, None, None, self.eps)
        y = y if self.weight is None else y * self.weight.to(wide.dtype)
        return (y if self.bias is None else y + self.bias.to(wide.dtype)).to(x.dtype)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; with a unit offset, `* (1 + weight)`."""

    def __init__(self, shape: tuple[int, ...], config: RMSNormConfig) -> None:
        super().__init__()
        self.eps, self.offset = config.eps, 1.0 if config.unit_offset else 0.0
        self.shape = shape[-1:]
        self.plain = len(shape) == 1 and not config.unit_offset
        self.weight = nn.Parameter(torch.full(shape, 1.0 - self.offset))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        wide = at_least_float32(x)
        return (F.rms_norm(wide, self.shape, None, self.eps) * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def build_norm(config: NormConfig, *shape: int) -> nn.Module:
    """A norm over the last axis, with weights of the given shape.

    >>> build_norm(RMSNormConfig(), 8)(torch.full((8,), 3.0)).round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if isinstance(config, LayerNormConfig):
        return LayerNorm(shape, config)
    if isinstance(config, RMSNormConfig):
        return RMSNorm(shape, config)
    if isinstance(config, NoNormConfig):
        return nn.Identity()
    raise ValueError(f"no module computes the norm {config.kind!r}")
