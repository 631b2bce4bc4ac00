"""Rotation of feature pairs by given cosines and sines: `(u, v) -> (u cos - v sin, u sin + v cos)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Turn the first `2 * cos.shape[-1]` features of `x` in pairs; the rest pass through.

    The arithmetic is at least float32 whatever the type of `x`, and the result has the type of `x`.

    >>> x, quarter = torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.zeros(2), torch.ones(2))
    >>> rotate_pairs(x, *quarter, "half").tolist(), rotate_pairs(x, *quarter, "adjacent").tolist()
    ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        # The compiler fuses the plain form, and torch.func takes no other.
        return rotate_pairs_ref(x, cos, sin, pairing)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos, sin, pairing)
    return turned(x, cos, sin, pairing)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairing `half` over the whole head, `cos` and `sin` from `whole_heads`: few operations, for a single token."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def whole_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for every feature of a head, of those for every pair.

    >>> x, (cos, sin) = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.rand(2, 2)
    >>> torch.allclose(rotate_halves(x, *whole_heads(cos, sin)), rotate_pairs(x, cos, sin, "half"))
    True
    """
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_pairs_ref(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """The same in plain form."""
    width = 2 * cos.shape[-1]
    u, v = pair(x[..., :width], pairing)
    turned = (u * cos - v * sin, v * cos + u * sin)
    together = torch.cat(turned, dim=-1) if pairing == "half" else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((together.to(x.dtype), x[..., width:]), dim=-1)


def pair(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """The first and the second features of all pairs, as views."""
    if pairing == "half":
        u, v = x.chunk(2, dim=-1)
        return u, v
    return x[..., 0::2], x[..., 1::2]


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """The rotation written straight into its result."""
    width = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    u, v = pair(x[..., :width], pairing)
    a, b = pair(out[..., :width], pairing)
    if x.dtype == cos.dtype:
        torch.mul(u, cos, out=a).addcmul_(v, sin, value=-1)
        torch.mul(v, cos, out=b).addcmul_(u, sin)
    else:
        a.copy_(u * cos - v * sin)
        b.copy_(v * cos + u * sin)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


class _Rotation(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of `x` has to be kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairing = pairing
        return turned(x, cos, sin, pairing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grads[0], cos, -sin, ctx.pairing), None, None, None
