"""Weights in 8 bits: whole numbers, and a scale for every output.

A row of weights is divided by its scale, its largest entry over 127, and rounded. Products are those of the whole
numbers, which every floating-point type has exactly, and then of the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127


class EightBit(NamedTuple):
    """A matrix `[N, K]` as int8, with what its rows are to be multiplied by, `[N]` in float32."""

    numbers: Tensor
    scale: Tensor


Matrix = Tensor | EightBit


def eight_bit_weight(weight: Tensor) -> EightBit:
    """A matrix in 8 bits, each row to the nearest of 255 values.

    >>> numbers, scale = eight_bit_weight(torch.tensor([[1.0, -2.54], [0.0, 0.0]]))
    >>> numbers.tolist(), round(float(scale[0]), 4)
    ([[50, -127], [0, 0]], 0.02)
    """
    wide = weight.detach().float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / LARGEST
    return EightBit((wide / scale[:, None]).round_().to(torch.int8, memory_format=torch.contiguous_format), scale)


def dequantized(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix in a floating-point type, as near as the type has it.

    >>> dequantized(eight_bit_weight(torch.tensor([[127.0, -3.2]])), torch.float64).tolist()
    [[127.0, -3.0]]
    """
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    scale = matrix.scale.double() if dtype == torch.float64 else matrix.scale
    return (matrix.numbers * scale[:, None]).to(dtype)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` for a matrix in 8 bits or in the type of `x`; under automatic casting in the type it asks for.

    >>> x, weight = torch.randn(3, 64), torch.randn(8, 64)
    >>> matrix = eight_bit_weight(weight)
    >>> bool(torch.allclose(linear(x, matrix), F.linear(x, dequantized(matrix, torch.float32)), atol=1e-4))
    True
    >>> bool((linear(x, matrix) - F.linear(x, weight)).norm() < 0.02 * F.linear(x, weight).norm())
    True
    """
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix, bias)
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    if x.dtype == torch.float16:  # whose range is too small for sums of whole numbers
        return F.linear(x, dequantized(matrix, x.dtype), bias)
    y = F.linear(x, matrix.numbers.to(x.dtype))
    y = y * matrix.scale  # in float32 or better
    return (y if bias is None else y + bias).to(x.dtype)


def looked_up(tokens: Tensor, matrix: EightBit, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix in 8 bits, in a floating-point type.

    >>> table = eight_bit_weight(torch.tensor([[127.0, 0.0], [254.0, -2.0]]))
    >>> looked_up(torch.tensor([1, 0]), table, torch.float32).tolist()
    [[254.0, -2.0], [127.0, 0.0]]
    """
    rows = EightBit(F.embedding(tokens.flatten(), matrix.numbers), matrix.scale[tokens.flatten()])
    return dequantized(rows, dtype).unflatten(0, tokens.shape)
