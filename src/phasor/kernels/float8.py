"""Matrix products in float8, with a scale for each row of the left factor and each column of the right.

A layer's output and the gradient of its input are products of 8-bit numbers. The gradient of its weight, a sum over
all tokens, stays in the activations' own type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EIGHT = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT).max


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and what its rows are to be multiplied by, `[rows, 1]` in float32.

    >>> bits, scale = eight_bits(torch.tensor([[1.0, -4.0], [0.0, 0.0]]))
    >>> (bits.float() * scale).tolist()
    [[1.0, -4.0], [0.0, 0.0]]
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / LARGEST
    return (x.float() / scale).to(EIGHT), scale


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` for `a [M, K]` and `b [N, K]`, both rounded to float8, summed in float32."""
    (left, rows), (right, columns) = eight_bits(a), eight_bits(b)
    right = right.contiguous()  # its transpose has to lie in columns
    return torch._scaled_mm(left, right.t(), rows, columns.t(), out_dtype=dtype, use_fast_accum=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return product(grad, weight.t(), x.dtype), (grad.t() @ x).to(weight.dtype)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`, the product in float8, in the type that automatic casting asks for.

    >>> x, weight = torch.randn(2, 3, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    >>> exact = torch.nn.functional.linear(x, weight)
    >>> bool((float8_linear(x, weight) - exact).norm() < 0.1 * exact.norm())
    True
    """
    kind = x.device.type
    wide = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    y = _Linear.apply(wide.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


def float8_obstacle(weight: Tensor) -> str | None:
    """Why a layer with this weight cannot take float8 products; None where it can."""
    if weight.dim() != 2 or any(size % 16 for size in weight.shape):
        return f"a weight {list(weight.shape)} has a side that is not a multiple of 16"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return f"{torch.cuda.get_device_name(weight.device)} has no float8 products"
    return None
