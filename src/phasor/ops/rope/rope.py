"""Rotation of feature pairs, `(u, v) -> (u cos - v sin, u sin + v cos)`: by given cosines and sines, or by positions.

`rotate_pairs` takes cosines and sines. `rope` and `rope_qkv` take positions, from which one Triton kernel computes the
angles itself: nothing is saved for the gradient, which is the inverse rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import CustomOp
from phasor.ops.dispatch import Dispatch, Path, functional_transform_why_not, triton_why_not
from phasor.ops.rope.outputs import empty_heads, empty_parts, empty_qkv
from phasor.ops.rope.phases import phase_op, phase_qkv_op
from phasor.ops.rope.reference import (
    PhaseArgs,
    RopeArgs,
    rope_qkv_ref,
    rope_ref,
    rotate_pairs_ref,
    split_pairs,
    split_qkv,
)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` features of `x` in pairs; the rest pass through.

    The arithmetic is at least float32 for any dtype of `x`, and the result has the dtype of `x`.

    >>> x, quarter = torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.zeros(2), torch.ones(2))
    >>> rotate_pairs(x, *quarter, "half").tolist(), rotate_pairs(x, *quarter, "adjacent").tolist()
    ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    """
    if torch.compiler.is_compiling() or functional_transform_why_not() is not None:
        # The compiler fuses the reference, and torch.func can transform nothing else.
        return rotate_pairs_ref(x, cos, sin, pairing)
    if torch.is_grad_enabled() and x.requires_grad:
        return _RotatePairs.apply(x, cos, sin, pairing)
    return _rotate_pairs(x, cos, sin, pairing)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairing `half` over the whole head, `cos` and `sin` from `expand_cos_sin`: few operations, for a single token."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def expand_cos_sin(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for every feature of a head, from those of every pair.

    >>> x, (cos, sin) = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.rand(2, 2)
    >>> torch.allclose(rotate_halves(x, *expand_cos_sin(cos, sin)), rotate_pairs(x, cos, sin, "half"))
    True
    """
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """The rotation written straight into its result."""
    rotary_dim = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    u, v = split_pairs(x[..., :rotary_dim], pairing)
    out_u, out_v = split_pairs(out[..., :rotary_dim], pairing)
    if x.dtype == cos.dtype:
        torch.mul(u, cos, out=out_u).addcmul_(v, sin, value=-1)
        torch.mul(v, cos, out=out_v).addcmul_(u, sin)
    else:
        out_u.copy_(u * cos - v * sin)
        out_v.copy_(v * cos + u * sin)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out


class _RotatePairs(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation: `x` is not saved for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairing = pairing
        return _rotate_pairs(x, cos, sin, pairing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _RotatePairs.apply(grads[0], cos, -sin, ctx.pairing), None, None, None


def rope(q: Tensor, k: Tensor, args: RopeArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """Queries `[B, T, H, D]`, or by group `[B, T, K, H/K, D]`, and keys `[B, T, K, D]`, rotated by their positions.

    Both come out with one dimension of heads, `[B, T, H, D]` and `[B, T, K, D]`.

    >>> quarter = RopeArgs(torch.tensor([1]), torch.tensor([2**62]), torch.ones(1))
    >>> q, _ = rope(torch.tensor([[[[1.0, 0.0]]]]), torch.zeros(1, 1, 1, 2), quarter, "half")
    >>> q.round().tolist()
    [[[[0.0, 1.0]]]]
    """
    rotated: tuple[Tensor, Tensor] = ROPE(q, k, args, pairing)
    return rotated


def rope_qkv(qkv: Tensor, args: RopeArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries `[B, T, H, D]` and keys `[B, T, K, D]`, and values, of a projection `[B, T, K, H/K + 2, D]`.

    Each group of the projection holds its queries, its key and its value.

    >>> zero = RopeArgs(torch.zeros(3).long(), torch.ones(2).long(), torch.ones(1))
    >>> [list(x.shape) for x in rope_qkv(torch.randn(1, 3, 2, 5, 4), zero, "half")]
    [[1, 3, 6, 4], [1, 3, 2, 4], [1, 3, 2, 4]]
    """
    parts: tuple[Tensor, Tensor, Tensor] = ROPE_QKV(qkv, args, pairing)
    return parts


def rope_kernel_why_not(positions: Tensor, x: Tensor) -> str | None:
    """Why the Triton kernel does not rotate heads of the dtype of `x` by these positions; None where it does."""
    if x.dtype == torch.float64:
        return "the kernel computes in float32, and the dtype is float64"
    return triton_why_not(positions, x)


def _rope_why_not(q: Tensor, k: Tensor, args: RopeArgs, pairing: str) -> str | None:
    return rope_kernel_why_not(args.positions, q)


def _rope_qkv_why_not(qkv: Tensor, args: RopeArgs, pairing: str) -> str | None:
    return rope_kernel_why_not(args.positions, qkv)


def rope_kernel(q: Tensor, k: Tensor, args: RopeArgs | PhaseArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """`rope` by the Triton kernel, in one pass, for callers that have checked `rope_kernel_why_not` already.

    Phases that are given for every token are taken by another kernel.
    """
    op = rope_op if isinstance(args, RopeArgs) else phase_op
    rotated: tuple[Tensor, Tensor] = op(q, k, args, pairing == "adjacent", False)
    return rotated


def rope_qkv_kernel(qkv: Tensor, args: RopeArgs | PhaseArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_qkv` by the Triton kernel: one pass for the rotation, another for the gradient of the projection."""
    if torch.is_grad_enabled() and qkv.requires_grad:
        op = rope_qkv_op if isinstance(args, RopeArgs) else phase_qkv_op
        parts: tuple[Tensor, Tensor, Tensor] = op(qkv, args, pairing == "adjacent", False)
        return parts
    q, k, v = split_qkv(qkv)
    return *rope_kernel(q, k, args, pairing), v


ROPE = Dispatch(
    Path("Triton kernel on queries and keys", rope_kernel, _rope_why_not), Path("torch, one pass per half", rope_ref)
)
ROPE_QKV = Dispatch(
    Path("Triton kernel on the projection", rope_qkv_kernel, _rope_qkv_why_not),
    Path("torch, one pass per half", rope_qkv_ref),
)


def _rope(q: Tensor, k: Tensor, args: RopeArgs, adjacent: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    from phasor.ops.rope.kernels import launch_rope

    out = empty_heads(q, k)
    launch_rope((q, k), out, *args, adjacent=adjacent, inverse=inverse)
    return out


def _rope_qkv(qkv: Tensor, args: RopeArgs, adjacent: bool, inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    from phasor.ops.rope.kernels import launch_rope

    out = empty_parts(qkv)
    launch_rope(split_qkv(qkv), out, *args, adjacent=adjacent, inverse=inverse)
    return out


def _merge_qkv(q: Tensor, k: Tensor, v: Tensor, args: RopeArgs, adjacent: bool, inverse: bool) -> Tensor:
    """A projection of rotated queries and keys, and values: the layout of `_rope_qkv` the other way around."""
    from phasor.ops.rope.kernels import launch_rope

    out = empty_qkv(q, k, v)
    launch_rope((q, k, v), split_qkv(out), *args, adjacent=adjacent, inverse=inverse)
    return out


rope_op = CustomOp("phasor::rope", _rope)
rope_qkv_op = CustomOp("phasor::rope_qkv", _rope_qkv)
merge_qkv_op = CustomOp("phasor::merge_qkv", _merge_qkv)
rope_op.register_fake(empty_heads)
rope_qkv_op.register_fake(empty_parts)
merge_qkv_op.register_fake(empty_qkv)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs.args)
    ctx.adjacent, ctx.inverse = inputs.adjacent, inputs.inverse


def _setup_rope_context(ctx: Any, inputs: Any, output: Any) -> None:
    _setup_context(ctx, inputs, output)
    ctx.shape = inputs.q.shape


def _rope_backward(ctx: Any, dq: Tensor, dk: Tensor) -> dict[str, Tensor | None]:
    dq, dk = rope_op(dq, dk, RopeArgs(*ctx.saved_tensors), ctx.adjacent, not ctx.inverse)
    return {"q": dq.view(ctx.shape), "k": dk}


def _rope_qkv_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, Tensor | None]:
    return {"qkv": merge_qkv_op(dq, dk, dv, RopeArgs(*ctx.saved_tensors), ctx.adjacent, not ctx.inverse)}


def _merge_qkv_backward(ctx: Any, dqkv: Tensor) -> dict[str, Tensor | None]:
    dq, dk, dv = rope_qkv_op(dqkv, RopeArgs(*ctx.saved_tensors), ctx.adjacent, not ctx.inverse)
    return {"q": dq, "k": dk, "v": dv}


rope_op.register_autograd(_rope_backward, setup_context=_setup_rope_context)
rope_qkv_op.register_autograd(_rope_qkv_backward, setup_context=_setup_context)
merge_qkv_op.register_autograd(_merge_qkv_backward, setup_context=_setup_context)
