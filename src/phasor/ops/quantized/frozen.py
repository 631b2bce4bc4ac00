"""Matrix products with frozen quantized weights: a gradient to the rows, and none to the weights.

What the backward pass needs is the matrix as it is held, in 8 or 4 bits. The gradient is the product with the matrix
dequantized anew, so no copy in 16 bits outlives a product.

Up to 64 rows a kernel reads NF4 weights as they are: 0.5 bytes each, where dequantizing to bfloat16 first would move
4.5. With more, that kernel would dequantize every weight once per tile of rows. Dequantized once to a temporary, 4.5
bytes are moved per weight for any rows: a hundredth of the time that the product takes with thousands of them,
which torch's libraries multiply faster than Triton does.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import CustomOp, custom_op, save_record, saved_record
from phasor.ops.dispatch import KERNEL_DTYPES, Dispatch, Path, compute_dtype, triton_why_not
from phasor.ops.quantized.matrix import Int8Matrix, dequantize
from phasor.ops.quantized.nf4 import BLOCK_SIZE, NF4Matrix

FrozenMatrix = Int8Matrix | NF4Matrix
MAX_ROWS = 64


def nf4_gemm(x: Tensor, matrix: NF4Matrix) -> Tensor:
    """`x W^T` by the kernel that reads 4 bits."""
    from phasor.ops.quantized import nf4_kernels

    return nf4_kernels.multiply(x, matrix)


def nf4_gemm_why_not(x: Tensor, matrix: NF4Matrix) -> str | None:
    """Why the kernel for few rows is not taken."""
    reason = triton_why_not(x, matrix.values)
    if reason is not None:
        return reason
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= MAX_ROWS:
        return f"with {rows} rows, not 1 to {MAX_ROWS}, the matrix is dequantized once for all"
    if matrix.inputs % BLOCK_SIZE:
        return f"blocks of {BLOCK_SIZE} weights cross rows of {matrix.inputs}"
    return None if x.dtype in KERNEL_DTYPES else f"{str(x.dtype)[6:]} has no kernel"


def dequantize_and_multiply(x: Tensor, matrix: NF4Matrix) -> Tensor:
    """`x W^T` with a temporary copy of the matrix in the dtype of `x`."""
    return F.linear(x, dequantize(matrix, x.dtype))


NF4_LINEAR = Dispatch(
    Path("NF4 kernel for few rows", nf4_gemm, nf4_gemm_why_not),
    Path("dequantized, then multiplied", dequantize_and_multiply),
)


@custom_op("phasor::nf4_linear")
def nf4_linear_op(x: Tensor, matrix: NF4Matrix) -> Tensor:
    """`x W^T` of an NF4 matrix."""
    y: Tensor = NF4_LINEAR(x, matrix)
    return y


@custom_op("phasor::nf4_linear_backward")
def nf4_linear_backward(grad: Tensor, matrix: NF4Matrix) -> Tensor:
    """The gradient to `x`."""
    return grad @ dequantize(matrix, grad.dtype)


@custom_op("phasor::int8_linear")
def int8_linear_op(x: Tensor, matrix: Int8Matrix) -> Tensor:
    """`x W^T` of an int8 matrix."""
    return F.linear(x, dequantize(matrix, x.dtype))


@custom_op("phasor::int8_linear_backward")
def int8_linear_backward(grad: Tensor, matrix: Int8Matrix) -> Tensor:
    """The gradient to `x`."""
    return grad @ dequantize(matrix, grad.dtype)


def register_gradient(op: CustomOp, backward: CustomOp) -> None:
    """Give a product its shapes and its gradient to `x`. Both are opaque to the compiler, which would otherwise keep
    the dequantized matrix from the forward to the backward pass.
    """
    op.register_fake(lambda x, matrix: x.new_empty(*x.shape[:-1], len(matrix.values)))
    backward.register_fake(lambda grad, matrix: grad.new_empty(*grad.shape[:-1], matrix.inputs))

    def setup_context(ctx: object, inputs: tuple[Tensor, FrozenMatrix], output: Tensor) -> None:
        save_record(ctx, inputs[1])

    def gradient(ctx: object, grad: Tensor) -> dict[str, Tensor | None]:
        (matrix,) = saved_record(ctx)
        return {"x": backward(grad, matrix)}

    op.register_autograd(gradient, setup_context=setup_context)


register_gradient(nf4_linear_op, nf4_linear_backward)
register_gradient(int8_linear_op, int8_linear_backward)


def frozen_linear(x: Tensor, matrix: FrozenMatrix, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` for a quantized matrix, with gradients to `x` and the bias; under autocast in the dtype of autocast.

    >>> import torch
    >>> from phasor.ops.quantized import quantize_nf4
    >>> x, matrix = torch.randn(3, 64, requires_grad=True), quantize_nf4(torch.randn(8, 64))
    >>> y = frozen_linear(x, matrix)
    >>> y.sum().backward()
    >>> weight = dequantize(matrix, torch.float32)
    >>> torch.allclose(y, x @ weight.T, atol=1e-5), torch.allclose(x.grad[0], weight.sum(0), atol=1e-5)
    (True, True)
    """
    if x.shape[-1] != matrix.inputs:
        raise ValueError(f"rows of {x.shape[-1]} elements do not fit a quantized matrix of {matrix.inputs} inputs")
    x = x.to(compute_dtype(x))
    y: Tensor = (nf4_linear_op if isinstance(matrix, NF4Matrix) else int8_linear_op)(x, matrix)
    return y if bias is None else y + bias.to(y.dtype)
