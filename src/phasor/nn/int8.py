"""Modules with weights in int8: linear layers, the token embedding, and the output projection of the head.

They hold one copy of their weights, as buffers: int8, and scales that stay float32 whatever dtype the model is
converted to. They are for inference and cannot be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from phasor.nn.embedding import Embedding
from phasor.nn.heads import LogitsHead
from phasor.ops.int8 import Int8Matrix, int8_embedding, int8_linear, quantize_int8


class Int8(nn.Module):
    """The base of modules with weights in int8."""

    weight: Tensor
    scales: Tensor

    def set_weight(self, weight: Tensor) -> None:
        """Quantize a weight and keep it."""
        if "weight" in self._parameters:
            del self._parameters["weight"]
        values, scales = quantize_int8(weight)
        if not (scales.is_meta or bool(scales.isfinite().all())):
            raise ValueError("a weight is not finite, and cannot be quantized to int8")
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)

    @property
    def matrix(self) -> Int8Matrix:
        """The weights."""
        if self.training:
            raise ValueError("a model with int8 weights cannot be trained: train the original model, and quantize that")
        return Int8Matrix(self.weight, self.scales)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        if not scales.is_meta:
            self.scales = scales.to(self.scales.device)
        return self


class Int8Linear(Int8):
    """`x W^T + b` with W in int8.

    >>> layer = nn.Linear(64, 32)
    >>> x, small = torch.randn(5, 64), Int8Linear(layer).eval()
    >>> bool((small(x) - layer(x)).norm() < 0.02 * layer(x).norm())
    True
    >>> small.weight.dtype, small.half().scales.dtype
    (torch.int8, torch.float32)
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.set_weight(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Embedding(Int8, Embedding):
    """A token embedding in int8, which a tied head multiplies by without a copy."""

    like: Tensor

    def set_weight(self, weight: Tensor) -> None:
        super().set_weight(weight)
        self.register_buffer("like", weight.new_empty(0), persistent=False)  # of the dtype of the vectors

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def table(self) -> Int8Matrix:
        return self.matrix

    def vectors(self, tokens: Tensor) -> Tensor:
        return int8_embedding(tokens, self.matrix, self.dtype)


class Int8Head(Int8, LogitsHead):
    """A head with its own output projection in int8."""

    weight: Tensor

    def table(self, tokens: Any) -> Int8Matrix:
        return self.matrix
