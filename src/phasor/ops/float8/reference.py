"""Float8 training as plain formulas: where values are rounded to 8 bits, and what is multiplied.

Everything but that rounding is computed in the dtype of the arguments: give it float64 tensors for an exact result.
A quantized matrix is a pair of float8 values and scales `[rows, 1]`, which are powers of two, so that dividing by them
loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.glu import glu_ref

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
MIN_SCALE = 2.0**-100
ALIGNMENT = 16  # both sides of a float8 matrix are multiples of this


def quantize_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 values of a matrix, and its scales: the least powers of two with `|x / scale| <= 448`.

    The scale of a row with an element that is not finite is NaN.

    >>> values, scale = quantize_rows_ref(torch.tensor([[1.0, -4.0], [0.0, 900.0]]))
    >>> values.tolist(), scale.tolist()
    ([[64.0, -256.0], [0.0, 224.0]], [[0.015625], [4.0]])
    """
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.log2(largest.double() / FLOAT8_MAX).ceil()
    scale = torch.exp2(exponent).clamp(min=MIN_SCALE)
    scale = torch.where(scale.isfinite(), scale, torch.nan).to(torch.promote_types(x.dtype, torch.float32))
    return (x / scale).to(FLOAT8), scale


def float8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` with the rows of `x` and `W` in float8.

    >>> float8_linear_ref(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 17.0]])).tolist()  # 17 becomes 16
    [[35.0]]
    """
    y = _dequantize(quantize_rows_ref(x), x.dtype) @ _dequantize(quantize_rows_ref(weight), x.dtype).mT
    return y if bias is None else y + bias


def float8_linear_backward_ref(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by `x [T, K]` and `weight [N, K]` for `grad [T, N]`.

    That by `x` is `grad W` with the rows of `grad` and the columns of the weight in float8. That by the weight is a
    sum over tokens, which have different scales: both scales of a token, relative to the largest, are multiplied into
    its gradient, which is rounded to float8 again. Only what is too small beside the largest is lost.

    >>> grad, x, weight = torch.ones(1, 1), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 16.0]])
    >>> [gradient.tolist() for gradient in float8_linear_backward_ref(grad, x, weight)]
    [[[3.0, 16.0]], [[1.0, 2.0]]]
    """
    dx = float8_linear_ref(grad, weight.mT)
    return dx, _weight_gradient_ref(quantize_rows_ref(grad), quantize_rows_ref(x), x.dtype)


def _weight_gradient_ref(grad: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    scale = grad[1] * x[1]
    largest = scale.amax().clamp(min=torch.finfo(torch.float32).tiny)
    rescaled = (grad[0].to(dtype) * (scale / largest)).to(FLOAT8)
    return largest * (rescaled.to(dtype).mT @ x[0].to(dtype))


def transpose_ref(values: Tensor, factor: Tensor | None = None) -> Tensor:
    """The transpose of float8 rows, each multiplied by its `factor [rows, 1]`, with zeros up to a multiple of 16.

    >>> transpose_ref(torch.tensor([[1.0, 2.0]]).to(FLOAT8), torch.tensor([[0.5]])).float()[:, :2].tolist()
    [[0.5, 0.0], [1.0, 0.0]]
    """
    rows, columns = values.shape
    y = torch.zeros((columns, -(-rows // ALIGNMENT) * ALIGNMENT), dtype=FLOAT8, device=values.device)
    y[:, :rows] = (values if factor is None else (values.float() * factor).to(FLOAT8)).t()
    return y


def glu_float8_ref(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`act(gate) * up` of gate and up side by side, `[rows, 2 h]`, quantized.

    >>> values, scale = glu_float8_ref(torch.tensor([[0.0, 2.0, 3.0, 4.0]]), "reglu")
    >>> (values.float() * scale).tolist()
    [[0.0, 8.0]]
    """
    return quantize_rows_ref(glu_ref(x, kind))


def glu_float8_backward_ref(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient by gate and up, side by side, quantized with one scale per row.

    >>> values, scale = glu_float8_backward_ref(torch.ones(1, 2), torch.tensor([[0.0, 2.0, 3.0, 4.0]]), "reglu")
    >>> (values.float() * scale).tolist()
    [[0.0, 4.0, 0.0, 2.0]]
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(glu_ref(x, kind), x, grad)
    return quantize_rows_ref(dx)


def float8_mlp_ref(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """`glu(x Up^T) Down^T` with all operands of the matrix products in float8.

    >>> x, up, down = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0]])
    >>> float8_mlp_ref(x, up, down, "reglu").tolist()
    [[8.0]]
    """
    hidden = _dequantize(glu_float8_ref(float8_linear_ref(x, up), kind), x.dtype)
    return hidden @ _dequantize(quantize_rows_ref(down), x.dtype).mT


def float8_mlp_backward_ref(
    grad: Tensor, x: Tensor, up: Tensor, down: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by `x`, `up` and `down`; the up projection's output is kept, the activation is in float8.

    >>> x, up, down = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[4.0]])
    >>> [gradient.tolist() for gradient in float8_mlp_backward_ref(torch.ones(1, 1), x, up, down, "reglu")]
    [[[8.0, 4.0]], [[8.0, 16.0], [4.0, 8.0]], [[2.0]]]
    """
    projected = float8_linear_ref(x, up)
    ddown = _weight_gradient_ref(quantize_rows_ref(grad), glu_float8_ref(projected, kind), x.dtype)
    dprojected = glu_float8_backward_ref(float8_linear_ref(grad, down.mT), projected, kind)
    dx = _dequantize(dprojected, x.dtype) @ _dequantize(quantize_rows_ref(up.mT), x.dtype).mT
    return dx, _weight_gradient_ref(dprojected, quantize_rows_ref(x), x.dtype), ddown


def _dequantize(matrix: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    values, scale = matrix
    return values.to(dtype) * scale.to(dtype)
