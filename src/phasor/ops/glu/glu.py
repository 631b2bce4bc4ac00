"""Gated activations: gate and up side by side, `[..., 2 h]`, become `act(gate) * up`, `[..., h]`.

`glu_linear` includes the projection after the activation. It does not save the activation for the backward pass: the
kernel that computes the gradient recomputes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import (
    KERNEL_DTYPES,
    Dispatch,
    Path,
    eager_kernel_why_not,
    triton_why_not,
)
from phasor.ops.glu.reference import GLU_ACTIVATIONS, glu_ref

# In compiled code calling an operator takes the host longer than the device takes for fewer elements than these.
MIN_COMPILED_ELEMENTS = 1 << 25


def glu(x: Tensor, activation: str) -> Tensor:
    """`act(gate) * up`; the kernel computes in float32, rounds once and saves only `x` for the gradient.

    >>> glu(torch.tensor([0.0, 2.0, 3.0, 4.0]), "reglu").tolist()
    [0.0, 8.0]
    """
    y: Tensor = GLU(x, activation)
    return y


def glu_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """`glu(x) W^T`, saving only `x` for the backward pass where the kernel runs.

    >>> x, weight = torch.randn(3, 8), torch.randn(5, 4)
    >>> torch.allclose(glu_linear(x, weight, "swiglu"), glu(x, "swiglu") @ weight.T)
    True
    """
    y: Tensor = GLU_LINEAR(x, weight, activation)
    return y


def glu_why_not(x: Tensor, activation: str) -> str | None:
    """Why the Triton kernel does not compute this gated activation; None where it does."""
    reason = eager_kernel_why_not("glu", x)
    if reason is None and activation not in GLU_ACTIVATIONS:
        return f"{activation!r} has no kernel"
    return reason


def glu_linear_why_not(x: Tensor, weight: Tensor, activation: str) -> str | None:
    """Why the activation is saved for the projection's gradient; None where it is recomputed."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return "no gradient is needed"
    autocast = torch.is_autocast_enabled(x.device.type)
    return recompute_why_not(x, activation, torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype)


def recompute_why_not(x: Tensor, activation: str, dtype: torch.dtype) -> str | None:
    """Why the activation is not recomputed in the backward pass, with products in this dtype; None where it is."""
    if activation not in GLU_ACTIVATIONS or x.dtype not in KERNEL_DTYPES:
        return f"{activation!r} in {str(x.dtype)[6:]} has no kernel"
    if x.dtype != dtype:
        return "the projection is computed in another dtype"
    if torch.compiler.is_compiling() and x.numel() < MIN_COMPILED_ELEMENTS:
        return "the compiler recomputes a small activation by itself"
    return triton_why_not(x)


def glu_then_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(glu(x, activation), weight)


@custom_op("phasor::glu")
def glu_op(x: Tensor, activation: str) -> Tensor:
    from phasor.ops.glu.kernels import glu_forward

    return glu_forward(x, activation)


@glu_op.register_fake
def _(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@custom_op("phasor::glu_backward")
def glu_backward_op(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    from phasor.ops.glu.kernels import glu_backward

    return glu_backward(dy, x, activation)


@glu_backward_op.register_fake
def _(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _glu_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.activation = inputs.activation
    ctx.save_for_backward(inputs.x)


def _glu_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    (x,) = ctx.saved_tensors
    return {"x": glu_backward_op(dy, x, ctx.activation)}


glu_op.register_autograd(_glu_backward, setup_context=_glu_setup_context)


@custom_op("phasor::glu_linear")
def glu_linear_op(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(glu_op(x, activation), weight.to(x.dtype))


@glu_linear_op.register_fake
def _(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@custom_op("phasor::glu_linear_backward")
def glu_linear_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, activation: str, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight, the latter empty unless `needs_dw`."""
    from phasor.ops.glu.kernels import glu_backward

    dy_rows, x_rows = dy.flatten(0, -2), x.flatten(0, -2)
    dh = dy_rows @ weight.to(x.dtype)
    # The kernel overwrites the gradient of the activation by the activation, which the weight's gradient needs.
    dx = glu_backward(dh, x_rows, activation, output=dh if needs_dw else None)
    dw = (dy_rows.t() @ dh).to(weight.dtype) if needs_dw else weight.new_empty(0)
    return dx.view(x.shape), dw


@glu_linear_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, activation: str, needs_dw: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if needs_dw else 0)


def _glu_linear_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.activation = inputs.activation
    ctx.save_for_backward(inputs.x, inputs.weight)


def _glu_linear_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_dw = glu_linear_op.needs_grad(ctx, "weight")
    dx, dw = glu_linear_backward_op(dy, x, weight, ctx.activation, needs_dw)
    return {"x": dx, "weight": dw if needs_dw else None}


glu_linear_op.register_autograd(_glu_linear_backward, setup_context=_glu_linear_setup_context)


GLU = Dispatch(
    Path("Triton kernel", glu_op, glu_why_not),
    Path("torch, activation and multiplication", glu_ref),
)
FUSED_GLU_LINEAR = Path("Triton kernel, recomputed in the backward pass", glu_linear_op, glu_linear_why_not)
GLU_LINEAR = Dispatch(
    FUSED_GLU_LINEAR,
    Path(
        "gated activation, then projection",
        glu_then_linear,
        inner=lambda x, weight, activation: GLU.explain(x, activation),
    ),
)
