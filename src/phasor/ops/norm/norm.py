"""Norms over the last axis, in at least float32 whatever the type: of a vector, or of a sum that is wanted as well.

`centered` takes the mean away first (LayerNorm; without it, RMSNorm). The result is scaled by `offset + weight`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import custom_op

WIDEST = 2**14  # a row has to fit into the registers of one program


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, offset: float = 0.0, centered: bool = False
) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, or `x / sqrt(mean(x^2) + eps) * (offset + weight) + bias`.

    >>> norm(torch.tensor([3.0, -3.0]), torch.ones(2), None, eps=0.0).tolist()
    [1.0, -1.0]
    """
    if why_not(x, weight, bias) is not None:
        return norm_ref(x, weight, bias, eps, offset, centered)
    return _norm(x, weight, bias, eps, offset, centered, result_type(x, offset))[0]


def add_norm(
    x: Tensor,
    r: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x + r` and its norm, each written once.

    >>> total, normed = add_norm(torch.tensor([1.0, -2.0]), torch.tensor([2.0, -1.0]), torch.ones(2), None, eps=0.0)
    >>> total.tolist(), normed.tolist()
    ([3.0, -3.0], [1.0, -1.0])
    """
    if x.shape != r.shape or why_not(x, weight, bias) is not None or why_not(r, weight, bias) is not None:
        return add_norm_ref(x, r, weight, bias, eps, offset, centered)
    s, y, _, _ = _add_norm(x, r, weight, bias, eps, offset, centered, result_type(x, offset))
    return s, y


def why_not(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why a norm takes its plain form; None where it takes its kernel."""
    reason = dispatch.eager_kernel_why_not("norm", x)
    if reason is not None:
        return reason
    if any(w is not None and w.dim() > 1 for w in (weight, bias)):
        return "each head has weights of its own"
    if x.shape[-1] > WIDEST:
        return f"a row of {x.shape[-1]} numbers is wider than {WIDEST}"
    return None


def one_operation_why_not(weight: Tensor | None, bias: Tensor | None, offset: float, centered: bool) -> str | None:
    """Why a norm is not one of torch's own operations; None where it is."""
    if offset:
        return "torch's own norms add nothing to their weight"
    if any(w is not None and w.dim() > 1 for w in (weight, bias)):
        return "each head has weights of its own"
    return "torch's own RMSNorm has no bias" if bias is not None and not centered else None


def norm_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, centered: bool = False
) -> Tensor:
    """The same in torch's own operations."""
    width = x.shape[-1:]
    if one_operation_why_not(weight, bias, offset, centered) is None:
        return F.layer_norm(x, width, weight, bias, eps) if centered else torch.rms_norm(x, width, weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    y = F.layer_norm(wide, width, None, None, eps) if centered else F.rms_norm(wide, width, None, eps)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype) if offset else weight.to(wide.dtype))
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def add_norm_ref(
    x: Tensor,
    r: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same, one after the other."""
    s = x + r
    return s, norm_ref(s, weight, bias, eps, offset, centered)


def result_type(x: Tensor, offset: float) -> torch.dtype:
    """That of the plain form: autocast has torch's own norms, which know no offset, give out float32."""
    return torch.float32 if torch.is_autocast_enabled(x.device.type) and not offset else x.dtype


@custom_op("phasor::norm")
def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, and what its gradient needs: the mean of each row, empty if not centered, and what it is scaled by."""
    from phasor.ops.norm.kernels import forward

    _, *made = forward(x, None, weight, bias, eps, offset, centered, dtype)
    return made[0], made[1], made[2]


@_norm.register_fake
def _(x: Tensor, weight: Any, bias: Any, eps: float, offset: float, centered: bool, dtype: torch.dtype) -> Any:
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows if centered else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), mean, x.new_empty(rows, dtype=torch.float32)


@custom_op("phasor::add_norm")
def _add_norm(
    x: Tensor,
    r: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, its norm, and what the gradient needs."""
    from phasor.ops.norm.kernels import forward

    return forward(x, r, weight, bias, eps, offset, centered, dtype)


@_add_norm.register_fake
def _(x: Tensor, r: Tensor, weight: Any, bias: Any, eps: float, offset: float, centered: bool, dtype: Any) -> Any:
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows if centered else 0, dtype=torch.float32)
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, r.dtype))
    return s, x.new_empty(x.shape, dtype=dtype), mean, x.new_empty(rows, dtype=torch.float32)


@custom_op("phasor::norm_backward")
def _norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by `x`, to which that of the sum is added, by weight and by bias, empty where there is none."""
    from phasor.ops.norm.kernels import backward

    return backward(grad, grad_sum, x, weight, bias, mean, scale, offset, centered)


@_norm_backward.register_fake
def _(grad: Tensor, grad_sum: Any, x: Tensor, weight: Any, bias: Any, *_: Any) -> Any:
    by = (x.new_empty(0) if w is None else torch.empty_like(w) for w in (weight, bias))
    return (x.new_empty(x.shape), *by)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.offset, ctx.centered, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _back(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    x, weight, bias, mean, scale = ctx.saved_tensors
    by_x, by_weight, by_bias = _norm_backward(grad, None, x, weight, bias, mean, scale, ctx.offset, ctx.centered)
    return by_x, None if weight is None else by_weight, None if bias is None else by_bias, *(None,) * 4


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, r, weight, bias, _, ctx.offset, ctx.centered, _ = inputs
    ctx.types = x.dtype, r.dtype
    s, _, mean, scale = output
    ctx.save_for_backward(s, weight, bias, mean, scale)
    ctx.mark_non_differentiable(mean, scale)
    ctx.set_materialize_grads(False)


def _back_sum(ctx: Any, grad_sum: Tensor | None, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    s, weight, bias, mean, scale = ctx.saved_tensors
    if grad is None:
        by_weight, by_bias, by_x = None, None, grad_sum
    else:
        by_x, by_weight, by_bias = _norm_backward(
            grad, grad_sum, s, weight, bias, mean, scale, ctx.offset, ctx.centered
        )
    one, other = (None if by_x is None else by_x.to(dtype) for dtype in ctx.types)
    return one, other, None if weight is None else by_weight, None if bias is None else by_bias, *(None,) * 4


_norm.register_autograd(_back, setup_context=_keep)
_add_norm.register_autograd(_back_sum, setup_context=_keep_sum)
