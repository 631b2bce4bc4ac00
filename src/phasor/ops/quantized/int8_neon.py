"""Products with 8-bit weights on ARM processors: `int8_neon.cpp`, compiled on first use.

Every 64 elements of a row, or 32 where 64 do not divide it, are rounded to 255 values by a
scale for each such group, and multiplied with the weights as integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.matrix import Int8Matrix

torch.library.define("phasor::int8_mm_neon", "(Tensor x, Tensor weights, Tensor scales) -> Tensor")
torch.library.register_fake(
    "phasor::int8_mm_neon", lambda x, weights, scales: x.new_empty(x.shape[0], weights.shape[0])
)


def int8_neon(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """The product of 8-bit weights and rows rounded to 8 bits."""
    load_kernel("int8_neon")
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    y = torch.ops.phasor.int8_mm_neon(rows, matrix.values.contiguous(), matrix.scale)
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], len(matrix.values))
