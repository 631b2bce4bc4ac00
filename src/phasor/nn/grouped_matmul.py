"""Matrix products of rows that are sorted by expert, each with its expert's matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert, where those of each end at `ends`, times their expert's matrix `[experts, in, out]`."""
    return F.grouped_mm(x, weight, offs=ends) if fits_grouped_mm(x, weight) else grouped_matmul_ref(x, weight, ends)


def fits_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matrix product takes these dtypes and sizes."""
    dtypes = (torch.bfloat16,) if torch.compiler.is_compiling() else dispatch.KERNEL_DTYPES
    _, rows, columns = weight.shape
    size = x.element_size()
    return x.dtype in dtypes and x.dtype == weight.dtype and rows * size % 16 == 0 and columns * size % 16 == 0


def grouped_matmul_ref(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_matmul` in plain torch: every row times every expert, of which its own is kept."""
    expert = torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True)  # [rows]
    y = x.new_zeros(len(x), weight.shape[-1])  # [rows, out]
    for e, matrix in enumerate(weight):
        y = y + torch.where((expert == e)[:, None], x, 0) @ matrix
    return y
