"""Weights in int8: integers, and one scale per output.

A row of weights is divided by its scale, which is its largest absolute value over 127, and rounded. Matrix products
multiply by the integers, which every floating-point dtype represents exactly, and then by the scale. The kernels that
read int8 weights in a decoding step are in `ops/decode`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_MAX = 127


class Int8Matrix(NamedTuple):
    """A matrix `[N, K]`: `values [N, K]` in int8, and the `scale [N]` of each row in float32."""

    values: Tensor
    scale: Tensor


Matrix = Tensor | Int8Matrix


def quantize_int8(weight: Tensor) -> Int8Matrix:
    """A matrix in int8, every element rounded to the nearest of the 255 values of its row.

    >>> values, scale = quantize_int8(torch.tensor([[1.0, -2.54], [0.0, 0.0]]))
    >>> values.tolist(), round(float(scale[0]), 4)
    ([[50, -127], [0, 0]], 0.02)
    """
    wide = weight.detach().float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / INT8_MAX
    return Int8Matrix((wide / scale[:, None]).round_().to(torch.int8, memory_format=torch.contiguous_format), scale)


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix in a floating-point dtype, rounded to it.

    >>> dequantize(quantize_int8(torch.tensor([[127.0, -3.2]])), torch.float64).tolist()
    [[127.0, -3.0]]
    """
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    scale = matrix.scale.double() if dtype == torch.float64 else matrix.scale
    return (matrix.values * scale[:, None]).to(dtype)


def int8_linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` for a matrix in int8 or in the dtype of `x`; under autocast in the dtype of autocast.

    >>> x, weight = torch.randn(3, 64), torch.randn(8, 64)
    >>> matrix = quantize_int8(weight)
    >>> bool(torch.allclose(int8_linear(x, matrix), F.linear(x, dequantize(matrix, torch.float32)), atol=1e-4))
    True
    >>> bool((int8_linear(x, matrix) - F.linear(x, weight)).norm() < 0.02 * F.linear(x, weight).norm())
    True
    """
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix, bias)
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    if x.dtype == torch.float16:  # sums of integers may exceed its range
        return F.linear(x, dequantize(matrix, x.dtype), bias)
    y = F.linear(x, matrix.values.to(x.dtype))
    y = y * matrix.scale  # in float32 or better
    return (y if bias is None else y + bias).to(x.dtype)


def int8_embedding(tokens: Tensor, matrix: Int8Matrix, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix in int8, in a floating-point dtype.

    >>> table = quantize_int8(torch.tensor([[127.0, 0.0], [254.0, -2.0]]))
    >>> int8_embedding(torch.tensor([1, 0]), table, torch.float32).tolist()
    [[254.0, -2.0], [127.0, 0.0]]
    """
    rows = Int8Matrix(F.embedding(tokens.flatten(), matrix.values), matrix.scale[tokens.flatten()])
    return dequantize(rows, dtype).unflatten(0, tokens.shape)
