"""Linear layers with frozen weights and a low-rank adapter: `x W^T + x A^T B^T` as one operation.

A matrix that is dequantized for its product gets the update then, `W + B A`, and both products are one. Elsewhere both
directions add in place: a sum of tensors that compilers and autograd form copies one of them first, and the output of a
layer may be the largest tensor of a model. Saved are x, `x A^T`, the factors, and the matrix as it is held. With a
gated activation before the product `x` is gate and up, and the activation is computed again in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from phasor.ops.custom_op import CustomOp, save_record, saved_record
from phasor.ops.glu.product import glu_product, glu_product_backward
from phasor.ops.low_rank import add_product, low_rank_gradients
from phasor.ops.quantized import NF4_LINEAR, FrozenMatrix, Int8Matrix, NF4Matrix, dequantize, updated_matrix

MIN_ROWS = 512  # with fewer, a pass over outputs takes less time than the update of a matrix


class PlainMatrix(NamedTuple):
    """A matrix `[N, K]` that is held in a floating-point dtype."""

    values: Tensor

    @property
    def inputs(self) -> int:
        """K."""
        return self.values.shape[1]


HeldMatrix = PlainMatrix | FrozenMatrix


def weight_of(matrix: HeldMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix in the dtype of a product."""
    return dequantize(matrix.values if isinstance(matrix, PlainMatrix) else matrix, dtype)


def project(x: Tensor, low: Tensor, matrix: HeldMatrix, A: Tensor, B: Tensor) -> Tensor:
    """`x W^T + low B^T` of rows `x [M, K]`, and `low [M, rank]`, which is `x A^T`."""
    if takes_update(matrix, x):
        return x @ updated_matrix(matrix, A, B).t()
    y: Tensor = NF4_LINEAR(x, matrix) if isinstance(matrix, NF4Matrix) else x @ weight_of(matrix, x.dtype).t()
    return add_product(y, low, B.t())


def project_back(dy: Tensor, dlow: Tensor, matrix: HeldMatrix, A: Tensor, B: Tensor) -> Tensor:
    """`dy W + dlow A` of rows `dy [M, N]`, and `dlow [M, rank]`, which is `dy B`."""
    if takes_update(matrix, dy):
        return dy @ updated_matrix(matrix, A, B)
    return add_product(dy @ weight_of(matrix, dy.dtype), dlow, A)


def takes_update(matrix: HeldMatrix, rows: Tensor) -> TypeGuard[FrozenMatrix]:
    """Whether rows are multiplied by the sum of a matrix and its update.

    The matrix is dequantized for many rows anyway, and one product spares a pass over outputs.
    """
    return not isinstance(matrix, PlainMatrix) and len(rows) >= MIN_ROWS


def define_op(name: str, kind: type[HeldMatrix]) -> CustomOp:
    """The operation for matrices of a kind, and its gradient.

    Both are opaque to the compiler, which would otherwise keep a dequantized matrix for the backward pass.
    """

    def forward(x: Tensor, matrix: Any, A: Tensor, B: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        h, low = (rows, rows @ A.t()) if activation is None else glu_product(rows, A, activation)
        return project(h, low, matrix, A, B).view(*x.shape[:-1], len(B)), low

    def backward(
        dy: Tensor, x: Tensor, matrix: Any, low: Tensor, A: Tensor, B: Tensor, activation: str | None, needs_dx: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, which is empty unless it or the activation's is needed, and of both factors."""
        dy, rows = dy.reshape(-1, len(B)), x.reshape(-1, x.shape[-1])
        dlow, dB = low_rank_gradients(dy, low, B)
        dx = dy.new_empty(0)
        if needs_dx or activation is not None:
            dx = project_back(dy, dlow, matrix, A, B)
        if activation is None:
            dA = dlow.t() @ rows
        else:
            dx, dA = glu_product_backward(dx, rows, dlow, activation)
        return dx.view(x.shape) if needs_dx else dy.new_empty(0), dA, dB

    for function in (forward, backward):
        function.__annotations__["matrix"] = kind
    op, backward_op = CustomOp(f"phasor::{name}", forward), CustomOp(f"phasor::{name}_backward", backward)
    op.register_fake(
        lambda x, matrix, A, B, activation: (
            x.new_empty(*x.shape[:-1], len(B)),
            x.new_empty(math.prod(x.shape[:-1]), len(A)),
        )
    )
    backward_op.register_fake(
        lambda dy, x, matrix, low, A, B, activation, needs_dx: (
            x.new_empty(x.shape if needs_dx else 0),
            A.new_empty(A.shape),
            B.new_empty(B.shape),
        )
    )

    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.activation = inputs.activation
        save_record(ctx, inputs.matrix, inputs.x, output[1], inputs.A, inputs.B)

    def gradient(ctx: Any, dy: Tensor, _: Tensor) -> dict[str, Tensor | None]:
        matrix, x, low, A, B = saved_record(ctx)
        needs_dx = op.needs_grad(ctx, "x")
        dx, dA, dB = backward_op(dy, x, matrix, low, A, B, ctx.activation, needs_dx)
        return {"x": dx if needs_dx else None, "A": dA, "B": dB}

    op.register_autograd(gradient, setup_context=setup_context)
    return op


OPS = {
    PlainMatrix: define_op("adapted_linear", PlainMatrix),
    Int8Matrix: define_op("int8_adapted_linear", Int8Matrix),
    NF4Matrix: define_op("nf4_adapted_linear", NF4Matrix),
}


def adapted_linear(
    x: Tensor, matrix: Tensor | FrozenMatrix, A: Tensor, B: Tensor, activation: str | None = None
) -> Tensor:
    """`h W^T + h A^T B^T` in the dtype of `x`, where h is `x`, or its gated activation: W has no gradient.

    >>> x, weight = torch.randn(3, 5), torch.randn(4, 5)
    >>> A, B = torch.randn(2, 5, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    >>> torch.allclose(adapted_linear(x, weight, A, B), x @ (weight + B @ A).T, atol=1e-5)
    True
    """
    held = PlainMatrix(matrix) if isinstance(matrix, Tensor) else matrix
    y: Tensor = OPS[type(held)](x, held, A.to(x.dtype), B.to(x.dtype), activation)[0]
    return y
