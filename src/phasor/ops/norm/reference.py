"""Norms in plain torch: one of torch's own norms where there is one, else in float32 step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.dispatch import Dispatch, Path


def norm_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, centered: bool = False
) -> Tensor:
    """The norm of `x` in plain torch.

    >>> norm_ref(torch.tensor([3.0, -3.0]), torch.zeros(2), None, eps=0.0, offset=1.0).tolist()
    [1.0, -1.0]
    """
    y: Tensor = TORCH_NORM(x, weight, bias, eps, offset, centered)
    return y


def add_norm_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x + residual` and its norm, one after the other.

    >>> total, y = add_norm_ref(torch.tensor([1.0, -2.0]), torch.tensor([2.0, -1.0]), None, None, eps=0.0)
    >>> total.tolist(), y.tolist()
    ([3.0, -3.0], [1.0, -1.0])
    """
    total = x + residual
    return total, norm_ref(total, weight, bias, eps, offset, centered)


def torch_norm_why_not(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> str | None:
    """Why `F.layer_norm` and `torch.rms_norm` do not compute this norm; None where one of them does."""
    if offset:
        return "torch's own norms add nothing to their weight"
    if any(w is not None and w.dim() > 1 for w in (weight, bias)):
        return "each head has weights of its own"
    return "torch's own RMSNorm has no bias" if bias is not None and not centered else None


def torch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> Tensor:
    """The norm as one operation of torch."""
    shape = x.shape[-1:]
    return F.layer_norm(x, shape, weight, bias, eps) if centered else torch.rms_norm(x, shape, weight, eps)


def float32_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> Tensor:
    """Normalize, scale and shift in at least float32, then round to the dtype of `x`."""
    shape = x.shape[-1:]
    wide = x if x.dtype == torch.float64 else x.float()
    y = F.layer_norm(wide, shape, None, None, eps) if centered else F.rms_norm(wide, shape, None, eps)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype) if offset else weight.to(wide.dtype))
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


TORCH_NORM = Dispatch(
    Path("one operation of torch", torch_norm, torch_norm_why_not),
    Path("torch in float32, then the weight", float32_norm),
)
