"""Frozen quantized matrices with an update of low rank, `W + B A`, in the dtype of a product.

The sum is in float32 and rounded once, as W alone is for a product. Its error is thus that of W: an update smaller than
the unit of a weight moves those that lie close to the middle between two numbers, and a sum over many weights has it.
Of a matrix that is held in 16 bits none lies there, and small updates would be lost: that one is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.dispatch import Dispatch, Path, triton_why_not
from phasor.ops.low_rank import DTYPES, shared_memory_why_not
from phasor.ops.quantized.frozen import FrozenMatrix
from phasor.ops.quantized.matrix import Int8Matrix, dequantize
from phasor.ops.quantized.nf4_dequantize import WORD

MAX_RANK = 128  # that tiles of a kernel hold
SHARED_MEMORY = 64 * 1024  # bytes that they take


def update_by_kernel(matrix: FrozenMatrix, A: Tensor, B: Tensor) -> Tensor:
    """`W + B A` by a Triton kernel, which reads W once."""
    if isinstance(matrix, Int8Matrix):
        from phasor.ops import low_rank_kernels

        return low_rank_kernels.int8_with_update(*matrix, A, B)
    from phasor.ops.quantized import nf4_kernels

    return nf4_kernels.with_update(matrix, A, B)


def update_in_torch(matrix: FrozenMatrix, A: Tensor, B: Tensor) -> Tensor:
    """`W + B A` of W in at least float32."""
    wide = torch.promote_types(A.dtype, torch.float32)
    return dequantize(matrix, wide).addmm_(B.to(wide), A.to(wide)).to(A.dtype)


def update_why_not(matrix: FrozenMatrix, A: Tensor, B: Tensor) -> str | None:
    """Why the kernel does not add the product."""
    reason = triton_why_not(matrix.values, A, B)
    if reason is not None:
        return reason
    if A.dtype not in DTYPES:
        return f"{str(A.dtype)[6:]} has no kernel"
    if len(A) > MAX_RANK:
        return f"the rank is {len(A)}, more than {MAX_RANK}"
    if not isinstance(matrix, Int8Matrix) and (matrix.values.shape[1] % WORD or matrix.values.storage_offset() % WORD):
        return f"its rows do not begin and end at multiples of {WORD} bytes"
    return shared_memory_why_not(A, SHARED_MEMORY)


UPDATED_MATRIX = Dispatch(
    Path("Triton kernel", update_by_kernel, update_why_not), Path("dequantized, then added to", update_in_torch)
)


def updated_matrix(matrix: FrozenMatrix, A: Tensor, B: Tensor) -> Tensor:
    """`W + B A` for `W [N, K]`, `A [rank, K]` and `B [N, rank]`, in the dtype of the factors.

    >>> from phasor.ops.quantized import quantize_int8
    >>> W = quantize_int8(torch.tensor([[127.0, -3.0]]))
    >>> updated_matrix(W, torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0]])).tolist()
    [[128.0, -1.0]]
    """
    weight: Tensor = UPDATED_MATRIX(matrix, A, B)
    return weight
