"""Attention to two sets of keys, put together by the weights that the sets have in the softmax over both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.launch import contiguous, empty_dense


def combine_ref(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, H, D]` and the logsumexp of scores to base 2 `[B, H, T]`, which is infinite without keys.

    >>> lse = torch.tensor([[[3.0]]])
    >>> out, lse = combine_ref(torch.ones(1, 1, 1, 2), lse, torch.zeros(1, 1, 1, 2), lse)
    >>> out.flatten().tolist(), lse.item()
    ([0.5, 0.5], 4.0)
    """
    lses = torch.stack((lse_a, lse_b))
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    lse = (lses * math.log(2.0)).logsumexp(0) / math.log(2.0)
    weights = torch.exp2(lses - lse.masked_fill(lse == -math.inf, 0.0)).mT[..., None]  # [2, B, T, H, 1]
    out = weights[0] * out_a + weights[1] * out_b
    return out.to(out_a.dtype), lse.masked_fill(lse == -math.inf, math.inf)


@custom_op("phasor::combine_attention")
def combine(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As `combine_ref`, by a Triton kernel in one pass."""
    from phasor.ops.attention.combine_kernels import launch_combine

    out, lse = empty_dense(out_a), torch.empty_like(lse_a)
    launch_combine(out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(), lse_b.contiguous(), out, lse)
    return out, lse


@combine.register_fake
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return empty_dense(out_a), torch.empty_like(lse_a)


@custom_op("phasor::combine_attention_backward")
def combine_backward(
    grad: Tensor, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all inputs of `combine`."""
    from phasor.ops.attention.combine_kernels import launch_combine_backward

    grads = empty_dense(out_a), torch.empty_like(lse_a), empty_dense(out_b), torch.empty_like(lse_b)
    inputs = [x.contiguous() for x in (out_a, lse_a, out_b, lse_b, lse)]
    launch_combine_backward(grad.contiguous(), contiguous(grad_lse), inputs, grads)
    return grads


@combine_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_dense(out_a), torch.empty_like(lse_a), empty_dense(out_b), torch.empty_like(lse_b)


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor | None]:
    inputs = ctx.saved_tensors
    grad = torch.zeros_like(inputs[0]) if grad is None else grad
    grads = combine_backward(grad, grad_lse, *inputs)
    return dict(zip(("out_a", "lse_a", "out_b", "lse_b"), grads, strict=True))


combine.register_autograd(backward, setup_context=setup_context)
