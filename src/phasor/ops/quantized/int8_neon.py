"""Products with 8-bit weights on ARM processors: `int8_neon.cpp`, compiled on first use.

Every 64 elements of a row, or 32 where 64 do not divide it, are rounded to 255 values by a
scale for each such group, and multiplied with the weights as integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.matrix import Int8Matrix

torch.library.define("phasor::int8_mm_neon", "(Tensor x, Tensor weights, Tensor scales, Tensor? bias) -> Tensor")
torch.library.register_fake(
    "phasor::int8_mm_neon", lambda x, weights, scales, bias: x.new_empty(*x.shape[:-1], len(weights))
)
multiply = torch.ops.phasor.int8_mm_neon.default


def int8_neon(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """The product of 8-bit weights and rows rounded to 8 bits."""
    load_kernel("int8_neon")
    bias = None if bias is None else bias.float()
    y: Tensor = multiply(x.float().contiguous(), matrix.values.contiguous(), matrix.scale, bias)
    return y.to(x.dtype)
