"""Products with 8-bit weights on x86 processors with VNNI instructions: `int8_vnni.cpp`, compiled on first use.

Rows are rounded to 255 values and multiplied with the weights as integers: few rows by a kernel of our own, every 64
elements by one scale; many by torch's library, each row by one scale. Either is one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.matrix import Int8Matrix

for name in ("phasor::int8_mm_vnni", "phasor::int8_gemm_vnni"):
    torch.library.define(name, "(Tensor x, Tensor weights, Tensor scales, Tensor? bias) -> Tensor")
    torch.library.register_fake(name, lambda x, weights, scales, bias: x.new_empty(*x.shape[:-1], len(weights)))
multiply_few = torch.ops.phasor.int8_mm_vnni.default
multiply_many = torch.ops.phasor.int8_gemm_vnni.default


def int8_vnni(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """The product of 8-bit weights and a few rows, of which every 64 elements are rounded to 8 bits."""
    load_kernel("int8_vnni")
    bias = None if bias is None else bias.float()
    y: Tensor = multiply_few(x.float().contiguous(), matrix.values.contiguous(), matrix.scale, bias)
    return y.to(x.dtype)


def int8_gemm_vnni(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """The product of 8-bit weights and many rows, each rounded to 8 bits."""
    load_kernel("int8_vnni")
    bias = None if bias is None else bias.float()
    y: Tensor = multiply_many(x.float().contiguous(), matrix.values.contiguous(), matrix.scale, bias)
    return y.to(x.dtype)
