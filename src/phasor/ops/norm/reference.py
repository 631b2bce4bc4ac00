"""Norms in plain torch, step by step in at least float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, centered: bool = False
) -> Tensor:
    """Normalize, scale and shift in at least float32, then round to the dtype of `x`.

    >>> norm_ref(torch.tensor([3.0, -3.0]), torch.zeros(2), None, eps=0.0, offset=1.0).tolist()
    [1.0, -1.0]
    """
    shape = x.shape[-1:]
    wide = x if x.dtype == torch.float64 else x.float()
    y = F.layer_norm(wide, shape, None, None, eps) if centered else F.rms_norm(wide, shape, None, eps)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype) if offset else weight.to(wide.dtype))
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


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


def norm_add_ref(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> Tensor:
    """`x + norm(branch)`, one after the other.

    >>> norm_add_ref(torch.ones(2), torch.tensor([3.0, -3.0]), None, None, eps=0.0).tolist()
    [2.0, 0.0]
    """
    return x + norm_ref(branch, weight, bias, eps, offset, centered)


def norm_add_norm_ref(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x + norm(branch)` and the next norm of it, one after the other.

    >>> x, branch = torch.tensor([1.0, 3.0]), torch.tensor([3.0, -3.0])
    >>> total, y = norm_add_norm_ref(x, branch, None, None, None, None, eps=0.0)
    >>> total.tolist(), y.tolist()
    ([2.0, 2.0], [1.0, 1.0])
    """
    total = x + norm_ref(branch, weight, bias, eps, offset, centered)
    return total, norm_ref(total, next_weight, next_bias, eps, offset, centered)
