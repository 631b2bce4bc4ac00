"""Matrices in 8 bits with one scale per row, and in 4 bits with one scale per group of a row. For NF4 see `nf4.py`.

In 8 bits a row is divided by its scale, which is its largest absolute value over 127, and rounded. In 4 bits the same
is done to each group of neighbors in a row, with the integers -8 to 7. Of a few scales the one with the least squared
error is taken. Scales of groups are bfloat16 numbers, because the CPU kernels take them so; weights are rounded by the
scale that is kept, so nothing is lost by that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phasor.ops.quantized.nf4 import NF4Matrix
from phasor.ops.quantized.nf4_dequantize import dequantize_nf4

INT8_MAX = 127
GROUP_SIZES = (32, 64, 128)
# The scale of a group as a multiple of (its extreme value) / -8, which would use -8 for that value.
INT4_FACTORS = (1.0, 0.95, 0.9, 0.85, -8 / 7, -1.05, -1.0, -0.95)
ROWS_AT_A_TIME = 4096


class Int8Matrix(NamedTuple):
    """A matrix `[N, K]`: `values [N, K]` in int8, and the `scale [N]` of each row in float32."""

    values: Tensor
    scale: Tensor

    @property
    def inputs(self) -> int:
        """K."""
        return self.values.shape[1]


class PackedInt4(NamedTuple):
    """A 4-bit matrix as the CPU kernel of a machine reads it: its `weights`, and `scales` where they are apart.

    `integers` is the matrix for products of 8-bit integers, where the machine has them for many rows.
    """

    weights: Tensor
    scales: Tensor | None
    integers: Int8Matrix | None = None


class Int4Matrix(NamedTuple):
    """A matrix `[N, K]`: `values [N, K/2]` in uint8, `scale [N, K/group]` in bfloat16, or as it was stored by others.

    A byte holds two neighbors, the first in its lower half, each plus 8. `packed` is what the CPU kernel of this
    machine reads, as `pack_int4` makes it.
    """

    values: Tensor
    scale: Tensor
    packed: PackedInt4 | None = None

    @property
    def inputs(self) -> int:
        """K."""
        return 2 * self.values.shape[1]

    @property
    def kernel_scale(self) -> Tensor:
        """The scales as CPU kernels take them, in bfloat16."""
        return self.scale.bfloat16()

    @property
    def group_size(self) -> int:
        """How many weights share a scale."""
        return self.inputs // self.scale.shape[1]


QuantizedMatrix = Int8Matrix | Int4Matrix
Matrix = Tensor | QuantizedMatrix | NF4Matrix


def quantize_int8(weight: Tensor) -> Int8Matrix:
    """A matrix in int8, every element rounded to the nearest of the 255 values of its row.

    >>> values, scale = quantize_int8(torch.tensor([[1.0, -2.54], [0.0, 0.0]]))
    >>> values.tolist(), round(float(scale[0]), 4)
    ([[50, -127], [0, 0]], 0.02)
    """
    wide = weight.detach().float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / INT8_MAX
    return Int8Matrix((wide / scale[:, None]).round_().to(torch.int8, memory_format=torch.contiguous_format), scale)


def quantize_int4(weight: Tensor, group_size: int = 32) -> Int4Matrix:
    """A matrix in 4 bits, every element rounded to the nearest of the 16 values of its group.

    >>> weight = torch.randn(8, 64)
    >>> matrix = quantize_int4(weight)
    >>> tuple(matrix.values.shape), tuple(matrix.scale.shape), matrix.group_size
    ((8, 32), (8, 2), 32)
    >>> bool((dequantize(matrix, torch.float32) - weight).norm() < 0.1 * weight.norm())
    True
    """
    parts = [quantize_rows_int4(rows.detach().float(), group_size) for rows in weight.split(ROWS_AT_A_TIME)]
    values, scale = (torch.cat(each) for each in zip(*parts, strict=True))
    return Int4Matrix(values, scale)


def quantize_rows_int4(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Bytes and scales of some rows."""
    groups = rows.unflatten(-1, (-1, group_size))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    extreme = torch.where(extreme == 0, 1.0, extreme)
    best, least = None, None
    for factor in INT4_FACTORS:
        scale = (factor * extreme).bfloat16().float()
        error = (round_int4(groups, scale).mul_(scale) - groups).square_().sum(-1, keepdim=True)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        best = scale if best is None else torch.where(better, scale, best)
        least = error if least is None else torch.where(better, error, least)
    assert best is not None
    nibbles = (round_int4(groups, best) + 8).to(torch.uint8).flatten(-2)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, best.squeeze(-1).bfloat16()


def round_int4(groups: Tensor, scale: Tensor) -> Tensor:
    """The integers of groups."""
    return (groups / scale).round_().clamp_(-8, 7)


def nibbles_of(values: Tensor) -> Tensor:
    """The integers 0 to 15 of bytes `[..., K/2]`, as `[..., K]` in uint8."""
    return torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix in a floating-point dtype, rounded to it.

    >>> dequantize(quantize_int8(torch.tensor([[127.0, -3.2]])), torch.float64).tolist()
    [[127.0, -3.0]]
    """
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if isinstance(matrix, NF4Matrix):
        return dequantize_nf4(matrix, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = matrix.scale.to(wide)
    if isinstance(matrix, Int8Matrix):
        return (matrix.values * scale[:, None]).to(dtype)
    integers = nibbles_of(matrix.values).view(torch.int8) - 8
    return (integers.unflatten(-1, (-1, matrix.group_size)) * scale[..., None]).flatten(-2).to(dtype)
