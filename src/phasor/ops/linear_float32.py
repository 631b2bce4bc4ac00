"""Linear layers of few outputs whose sums are needed in float32, of inputs and weights of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`, in float32 at least.

    Products of numbers of 16 bits are exact in float32, and a GPU sums them by its tensor cores, many times as fast as
    products of float32.

    >>> x, weight = torch.randn(3, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    >>> linear_float32(x, weight).dtype, torch.equal(linear_float32(x, weight), x.float() @ weight.float().t())
    (torch.float32, True)
    """
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        y: Tensor = sum_in_float32(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.float()
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


@custom_op("phasor::sum_in_float32")
def sum_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` of rows `[N, K]` in 16 bits, as float32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


@sum_in_float32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs.x, inputs.weight)


def backward(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    """Gradients in the dtype of what they are of, as of any layer in 16 bits."""
    x, weight = ctx.saved_tensors
    grad = grad.to(x.dtype)
    return {"x": grad @ weight, "weight": grad.t() @ x}


sum_in_float32.register_autograd(backward, setup_context=setup_context)
