"""Rotation of feature pairs, `(u, v) -> (u cos - v sin, u sin + v cos)`: by given cosines and sines, or by positions.

`rotate_pairs` takes cosines and sines. `rope` and `rope_qkv` take positions and make the angles inside of
one Triton kernel, `rotary_triton.py`: nothing is kept for the gradient, which is the rotation back.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import CustomOp


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """RopeArgs the first `2 * cos.shape[-1]` features of `x` in pairs; the rest pass through.

    The arithmetic is at least float32 whatever the type of `x`, and the result has the type of `x`.

    >>> x, quarter = torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.zeros(2), torch.ones(2))
    >>> rotate_pairs(x, *quarter, "half").tolist(), rotate_pairs(x, *quarter, "adjacent").tolist()
    ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    """
    if torch.compiler.is_compiling() or dispatch.functional_transform_why_not() is not None:
        # The compiler fuses the plain form, and torch.func takes no other.
        return rotate_pairs_ref(x, cos, sin, pairing)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos, sin, pairing)
    return _rotate_pairs(x, cos, sin, pairing)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairing `half` over the whole head, `cos` and `sin` from `expand_cos_sin`: few operations, for a single token."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def expand_cos_sin(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for every feature of a head, of those for every pair.

    >>> x, (cos, sin) = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.rand(2, 2)
    >>> torch.allclose(rotate_halves(x, *expand_cos_sin(cos, sin)), rotate_pairs(x, cos, sin, "half"))
    True
    """
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_pairs_ref(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """The same in plain form."""
    width = 2 * cos.shape[-1]
    u, v = split_pairs(x[..., :width], pairing)
    turned = (u * cos - v * sin, v * cos + u * sin)
    together = torch.cat(turned, dim=-1) if pairing == "half" else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((together.to(x.dtype), x[..., width:]), dim=-1)


def split_pairs(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """The first and the second features of all pairs, as views."""
    if pairing == "half":
        u, v = x.chunk(2, dim=-1)
        return u, v
    return x[..., 0::2], x[..., 1::2]


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """The rotation written straight into its result."""
    width = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    u, v = split_pairs(x[..., :width], pairing)
    a, b = split_pairs(out[..., :width], pairing)
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
        return _rotate_pairs(x, cos, sin, pairing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grads[0], cos, -sin, ctx.pairing), None, None, None


class RopeArgs(NamedTuple):
    """What turns the heads of tokens: angles `position * increment` in 2^-64 of a turn, and a factor on the result."""

    positions: Tensor  # int64, [T] or [B or 1, T]
    increments: Tensor  # int64, [pairs]
    factor: Tensor  # float32, [1]


def rope(q: Tensor, k: Tensor, turn: RopeArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]` turned by their positions, in one pass, by the Triton kernel.

    Queries may come by group, `[B, T, K, H/K, D]`; they go as `[B, T, H, D]`.
    """
    made: tuple[Tensor, Tensor] = rope_op(q, k, *turn, pairing == "adjacent", False)
    return made


def rope_qkv(projected: Tensor, turn: RopeArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]` turned, and values, of a projection `[B, T, K, H/K + 2, D]`.

    In one pass by the Triton kernel, and the projection's gradient in another. A group has its queries, key and value.
    """
    if torch.is_grad_enabled() and projected.requires_grad:
        return rope_qkv_op(projected, *turn, pairing == "adjacent", False)
    q, k, v = split_qkv(projected)
    return *rope(q, k, turn, pairing), v


def rope_ref(q: Tensor, k: Tensor, turn: RopeArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """The same in plain form."""
    phase = turn.positions[..., None] * turn.increments  # [..., T, pairs]
    angle = phase.to(torch.float64)[..., None, :] * (2 * math.pi / 2**64)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    cos, sin = torch.cos(angle).to(exact) * turn.factor, torch.sin(angle).to(exact) * turn.factor
    q = q.flatten(2, -2)
    return rotate_pairs_ref(q, cos, sin, pairing), rotate_pairs_ref(k, cos, sin, pairing)


def rope_qkv_ref(projected: Tensor, turn: RopeArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain form."""
    q, k, v = split_qkv(projected)
    return *rope_ref(q, k, turn, pairing), v


def split_qkv(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries by group `[B, T, K, H/K, D]`, keys and values `[B, T, K, D]` as views of a projection."""
    queries = projected.shape[-2] - 2
    if not (torch.is_grad_enabled() and projected.requires_grad):
        return projected.narrow(-2, 0, queries), projected.select(-2, queries), projected.select(-2, queries + 1)
    q, k, v = projected.split((queries, 1, 1), dim=-2)  # whose gradients come together in one copy
    return q, k.squeeze(-2), v.squeeze(-2)


def _rope(
    q: Tensor, k: Tensor, positions: Tensor, increments: Tensor, factor: Tensor, adjacent: bool, back: bool
) -> tuple[Tensor, Tensor]:
    from phasor.ops.rope.kernels import launch

    out = empty_heads(q, k)
    launch((q, k), out, positions, increments, factor, adjacent=adjacent, back=back)
    return out


def empty_heads(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], q.shape[2:-1].numel(), q.shape[-1])), k.new_empty(k.shape)


def _rope_qkv(
    projected: Tensor, positions: Tensor, increments: Tensor, factor: Tensor, adjacent: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from phasor.ops.rope.kernels import launch

    out = empty_parts(projected)
    launch(split_qkv(projected), out, positions, increments, factor, adjacent=adjacent, back=back)
    return out


def empty_parts(projected: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, groups, both, width = projected.shape
    q, k, v = (projected.new_empty((rows, tokens, heads, width)) for heads in (groups * (both - 2), groups, groups))
    return q, k, v


def _merge_qkv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, increments: Tensor, factor: Tensor, adjacent: bool, back: bool
) -> Tensor:
    """A projection of queries, keys and values that are turned on the way: `_rope_qkv` the other way around."""
    from phasor.ops.rope.kernels import launch

    out = empty_projection(q, k, v)
    launch((q, k, v), split_qkv(out), positions, increments, factor, adjacent=adjacent, back=back)
    return out


def empty_projection(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    rows, tokens, groups, width = k.shape
    return q.new_empty((rows, tokens, groups, q.shape[2] // groups + 2, width))


rope_op = CustomOp("phasor::rope", _rope)
rope_qkv_op = CustomOp("phasor::rope_qkv", _rope_qkv)
merge_qkv_op = CustomOp("phasor::merge_qkv", _merge_qkv)
rope_op.register_fake(empty_heads)
rope_qkv_op.register_fake(empty_parts)
merge_qkv_op.register_fake(empty_projection)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *heads, positions, increments, factor, adjacent, back = inputs
    ctx.save_for_backward(positions, increments, factor)
    ctx.shape, ctx.adjacent, ctx.back = heads[0].shape, adjacent, back


def heads_back(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
    q, k = rope_op(q, k, *ctx.saved_tensors, ctx.adjacent, not ctx.back)
    return q.view(ctx.shape), k, None, None, None, None, None


def projection_back(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    return merge_qkv_op(q, k, v, *ctx.saved_tensors, ctx.adjacent, not ctx.back), None, None, None, None, None


def join_back(ctx: Any, projected: Tensor) -> tuple[Tensor | None, ...]:
    return *rope_qkv_op(projected, *ctx.saved_tensors, ctx.adjacent, not ctx.back), None, None, None, None, None


rope_op.register_autograd(heads_back, setup_context=setup_context)
rope_qkv_op.register_autograd(projection_back, setup_context=setup_context)
merge_qkv_op.register_autograd(join_back, setup_context=setup_context)
