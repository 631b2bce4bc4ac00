"""Gated activations: gate and up side by side, `[..., 2 h]`, become `act(gate) * up`, `[..., h]`.

Together with the projection that follows, the activation need not be kept for the backward pass: the kernel that makes
its gradient makes it again on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import custom_op

GLU_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": partial(F.gelu, approximate="tanh"),
}


def glu(x: Tensor, kind: str) -> Tensor:
    """`act(gate) * up`; the kernel computes in float32 and rounds once, and its gradient keeps nothing but `x`.

    >>> glu(torch.tensor([0.0, 2.0, 3.0, 4.0]), "reglu").tolist()
    [0.0, 8.0]
    """
    return glu_ref(x, kind) if why_not(x, kind) is not None else _glu(x, kind)


def why_not(x: Tensor, kind: str) -> str | None:
    """Why a gated activation takes its plain form; None where it takes its kernel."""
    reason = dispatch.eager_kernel_why_not("glu", x)
    if reason is None and kind not in GLU_ACTIVATIONS:
        return f"{kind!r} has no kernel"
    return reason


def glu_ref(x: Tensor, kind: str) -> Tensor:
    """The same in plain form."""
    gate, up = x.chunk(2, dim=-1)
    return GLU_ACTIVATIONS[kind](gate) * up


@custom_op("phasor::glu")
def _glu(x: Tensor, kind: str) -> Tensor:
    from phasor.ops.glu.kernels import forward

    return forward(x, kind)


@_glu.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@custom_op("phasor::glu_backward")
def _glu_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    from phasor.ops.glu.kernels import backward

    return backward(grad, x, kind)


@_glu_backward.register_fake
def _(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _glu_backward(grad, *ctx.saved_tensors, ctx.kind), None


_glu.register_autograd(_back, setup_context=_keep)


def glu_linear(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """`glu(x) W^T`, of which nothing is kept for the backward pass but `x`.

    >>> x, weight = torch.randn(3, 8), torch.randn(5, 4)
    >>> torch.allclose(glu_linear(x, weight, "swiglu"), glu(x, "swiglu") @ weight.T)
    True
    """
    if linear_why_not(x, weight, kind) is not None:
        return F.linear(glu(x, kind), weight)
    return _glu_linear(x, weight, kind)


def linear_why_not(x: Tensor, weight: Tensor, kind: str) -> str | None:
    """Why a gated activation is kept for the projection after it; None where it is made again."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return "nothing is trained"
    if kind not in GLU_ACTIVATIONS or x.dtype not in dispatch.KERNEL_DTYPES:
        return f"{kind!r} in {str(x.dtype)[6:]} has no kernel"
    casts = torch.is_autocast_enabled(x.device.type)
    if x.dtype != (torch.get_autocast_dtype(x.device.type) if casts else weight.dtype):
        return "the projection is computed in another type"
    return dispatch.triton_why_not(x)


@custom_op("phasor::glu_linear")
def _glu_linear(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    return F.linear(_glu(x, kind), weight.to(x.dtype))


@_glu_linear.register_fake
def _(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@custom_op("phasor::glu_linear_backward")
def _glu_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, kind: str, learned: bool) -> tuple[Tensor, Tensor]:
    """The gradients by `x` and by weight, the latter empty where it is not learned."""
    from phasor.ops.glu.kernels import backward

    rows, flat = grad.flatten(0, -2), x.flatten(0, -2)
    inner = rows @ weight.to(x.dtype)
    by_x = backward(inner, flat, kind, output=inner if learned else None)
    return by_x.view(x.shape), (rows.t() @ inner).to(weight.dtype) if learned else weight.new_empty(0)


@_glu_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, kind: str, learned: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if learned else 0)


def _keep_linear(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, weight, ctx.kind = inputs
    ctx.save_for_backward(x, weight)


def _back_linear(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    learned = ctx.needs_input_grad[1]
    by_x, by_weight = _glu_linear_backward(grad, *ctx.saved_tensors, ctx.kind, learned)
    return by_x, by_weight if learned else None, None


_glu_linear.register_autograd(_back_linear, setup_context=_keep_linear)
