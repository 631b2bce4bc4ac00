"""Magnitudes times the cosines and sines of their phases: a Triton kernel each way, with the gradient of the shifts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import triton_why_not
from phasor.ops.polar.reference import PolarArgs, polar_features_ref


def polar_features(x: Tensor, args: PolarArgs, *, positive: bool) -> Tensor:
    """`polar_features_ref` by the kernel, for callers that have checked `polar_why_not` already."""
    features: Tensor = polar_op(x, args, positive)
    return features


def polar_why_not(tokens: int, x: Tensor) -> str | None:
    """Why no kernel computes the features of that many tokens of the dtype of `x`; None where one does."""
    if tokens == 1:
        return "one token takes few operations"
    if x.dtype == torch.float64:
        return "the kernel computes in float32, and the dtype is float64"
    return triton_why_not(x)


@custom_op("phasor::polar_features")
def polar_op(x: Tensor, args: PolarArgs, positive: bool) -> Tensor:
    from phasor.ops.polar.kernels import polar_forward

    out = empty_features(x)
    polar_forward(x, args, positive, out)
    return out


@custom_op("phasor::polar_features_backward")
def polar_backward_op(dy: Tensor, x: Tensor, args: PolarArgs, positive: bool) -> tuple[Tensor, Tensor]:
    """The gradients of `x`, and of the shifts where they are learned."""
    from phasor.ops.polar.kernels import polar_backward

    dx, dshifts = empty_gradients(dy, x, args)
    summed = polar_backward(dy, x, args, positive, dx)
    return dx, dshifts if summed is None else summed


def empty_features(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:2], x.shape[2:-1].numel(), 2 * x.shape[-1]))


def empty_gradients(dy: Tensor, x: Tensor, args: PolarArgs, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((0,) if args.radians is None else args.radians.shape, dtype=torch.float32)


polar_op.register_fake(empty_features)
polar_backward_op.register_fake(empty_gradients)


def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    save_record(ctx, inputs.args, inputs.x)
    ctx.positive = inputs.positive


def backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    args, x = saved_record(ctx)
    if torch.is_grad_enabled():  # for a second derivative
        wanted = [x] if args.radians is None else [x, args.radians]
        y = polar_features_ref(x, args, ctx.positive)
        dx, *dshifts = torch.autograd.grad(y, wanted, dy, create_graph=True)
        return {"x": dx, "radians": dshifts[0] if dshifts else None}
    dx, dshift = polar_backward_op(dy, x, args, ctx.positive)
    return {"x": dx, "radians": None if args.radians is None else dshift}


polar_op.register_autograd(backward, setup_context=setup_context)
