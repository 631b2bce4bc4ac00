"""NF4 matrices back in a floating-point dtype, by a Triton kernel or by table lookups."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.dispatch import KERNEL_DTYPES, Dispatch, Path, triton_why_not
from phasor.ops.quantized.nf4 import (
    BLOCK_SIZE,
    NESTED_BLOCK_SIZE,
    NF4Matrix,
    block_scales,
    dynamic_map,
    look_up,
    nf4_code,
)

WORD = 4  # bytes that the kernel reads at once


def dequantize_in_torch(matrix: NF4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix by table lookups."""
    device = matrix.values.device
    scales = block_scales(*matrix[1:], dynamic_map(device), NESTED_BLOCK_SIZE)
    return look_up(matrix.values, nf4_code(device), scales, BLOCK_SIZE).view(len(matrix.values), -1).to(dtype)


def dequantize_by_kernel(matrix: NF4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix by a Triton kernel."""
    from phasor.ops.quantized import nf4_kernels

    return nf4_kernels.dequantize(matrix, dtype)


def dequantize_why_not(matrix: NF4Matrix, dtype: torch.dtype) -> str | None:
    """Why the kernel does not dequantize a matrix."""
    reason = triton_why_not(matrix.values)
    if reason is not None:
        return reason
    if matrix.values.numel() % WORD or matrix.values.storage_offset() % WORD:
        return f"its bytes do not begin and end at multiples of {WORD}"
    return None if dtype in KERNEL_DTYPES else f"{str(dtype)[6:]} has no kernel"


NF4_DEQUANTIZE = Dispatch(
    Path("NF4 kernel", dequantize_by_kernel, dequantize_why_not), Path("table lookups", dequantize_in_torch)
)


def dequantize_nf4(matrix: NF4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix `[N, K]` in a floating-point dtype: float32 products, rounded once.

    >>> from phasor.ops.quantized import quantize_nf4
    >>> weight = torch.tensor([[1.0, -0.25, 0.0, 0.5]])
    >>> [round(x, 3) for x in dequantize_nf4(quantize_nf4(weight), torch.float32)[0].tolist()]
    [1.0, -0.284, 0.0, 0.441]
    """
    weight: Tensor = NF4_DEQUANTIZE(matrix, dtype)
    return weight
