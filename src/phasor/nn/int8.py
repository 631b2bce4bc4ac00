"""Parts of a model whose weights are in 8 bits: projections, the token table, and the table of the head.

They hold one copy of their weights, as buffers: int8, and float32 scales that stay so whatever type the model is
brought to. They are for use and not for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from phasor.nn.embedding import Embedding
from phasor.nn.heads import LogitsHead
from phasor.ops.int8.int8 import EightBit, eight_bit_weight, linear, looked_up


class Int8(nn.Module):
    """What parts with weights in 8 bits have in common."""

    weight: Tensor
    scales: Tensor

    def hold(self, weight: Tensor) -> None:
        """Have these weights, in 8 bits."""
        if "weight" in self._parameters:
            del self._parameters["weight"]
        numbers, scales = eight_bit_weight(weight)
        if not (scales.is_meta or bool(scales.isfinite().all())):
            raise ValueError("a weight is not finite, and has no form in int8")
        self.register_buffer("weight", numbers)
        self.register_buffer("scales", scales)

    @property
    def matrix(self) -> EightBit:
        """The weights."""
        if self.training:
            raise ValueError(
                "a model with weights in int8 is not trained: train the one it was made of, and quantize that"
            )
        return EightBit(self.weight, self.scales)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        if not scales.is_meta:
            self.scales = scales.to(self.scales.device)
        return self


class Int8Linear(Int8):
    """`x W^T + b` with W in 8 bits.

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
        self.hold(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Embedding(Int8, Embedding):
    """A table of token vectors in 8 bits, which a tied head multiplies with as it is."""

    like: Tensor

    def hold(self, weight: Tensor) -> None:
        super().hold(weight)
        self.register_buffer("like", weight.new_empty(0), persistent=False)  # of the type that vectors are given in

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def table(self) -> EightBit:
        return self.matrix

    def vectors(self, tokens: Tensor) -> Tensor:
        return looked_up(tokens, self.matrix, self.dtype)


class Int8Head(Int8, LogitsHead):
    """A head with a table of its own in 8 bits."""

    weight: Tensor

    def table(self, tokens: Any) -> EightBit:
        return self.matrix
