"""Rotation by phases that are given for every token, and for groups of heads, by one Triton kernel each way.

The gradient is the inverse rotation. Where angles are learned, the same pass computes theirs from the rotated queries
and keys, which attention keeps anyway: `dy` times `y`, rotated by a quarter, summed over the heads of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.rope.outputs import empty_heads, empty_parts, empty_qkv
from phasor.ops.rope.reference import PhaseArgs, split_pairs, split_qkv


@custom_op("phasor::rotate_by_phases")
def phase_op(q: Tensor, k: Tensor, args: PhaseArgs, adjacent: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotated queries `[B, T, H, D]` and keys `[B, T, K, D]`, of queries with or without a dimension of groups."""
    from phasor.ops.rope.phase_kernels import launch_phases

    out = empty_heads(q, k)
    launch_phases((q, k), out, args, adjacent=adjacent, inverse=inverse)
    return out


@custom_op("phasor::rotate_qkv_by_phases")
def phase_qkv_op(qkv: Tensor, args: PhaseArgs, adjacent: bool, inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a projection `[B, T, K, H/K + 2, D]`, and its values."""
    from phasor.ops.rope.phase_kernels import launch_phases

    out = empty_parts(qkv)
    launch_phases(split_qkv(qkv), out, args, adjacent=adjacent, inverse=inverse)
    return out


@custom_op("phasor::rotate_by_phases_backward")
def backward_op(
    dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, args: PhaseArgs, adjacent: bool, inverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients rotated, and with the queries and keys that they are of, those of the angles."""
    from phasor.ops.rope.phase_kernels import launch_phases

    *out, dangle = gradients = empty_gradients(dq, dk, q, k, args)
    launch_phases((dq, dk), out, args, adjacent=adjacent, inverse=inverse, rotated=(q, k), dangle=dangle)
    return gradients


@custom_op("phasor::merge_qkv_by_phases")
def merge_op(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor | None, k: Tensor | None,
    args: PhaseArgs, adjacent: bool, inverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, into the gradient of a projection."""
    from phasor.ops.rope.phase_kernels import launch_phases

    out, dangle = empty_results(dq, dk, dv, q, k, args)
    parts, into = (dq, dk, dv), split_qkv(out)
    launch_phases(parts, into, args, adjacent=adjacent, inverse=inverse, rotated=(q, k), dangle=dangle)
    return out, dangle


def empty_angles(dq: Tensor, q: Tensor | None, args: PhaseArgs) -> Tensor:
    """Gradients of the angles `[B, T, groups, pairs]`; none where they are not learned."""
    shape = (0,) if q is None else (*dq.shape[:2], *args.phases.shape[2:])
    return dq.new_empty(shape, dtype=torch.float32)


def empty_gradients(
    dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, args: PhaseArgs, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_heads(dq, dk), empty_angles(dq, q, args)


def empty_results(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor | None, k: Tensor | None, args: PhaseArgs, *_: Any
) -> tuple[Tensor, Tensor]:
    return empty_qkv(dq, dk), empty_angles(dq, q, args)


phase_op.register_fake(empty_heads)
phase_qkv_op.register_fake(empty_parts)
backward_op.register_fake(empty_gradients)
merge_op.register_fake(empty_results)


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    learned = inputs.args.radians is not None
    save_record(ctx, inputs.args, *(output[:2] if learned else ()))
    ctx.adjacent, ctx.inverse, ctx.shape = inputs.adjacent, inputs.inverse, inputs[0].shape


def read_saved(ctx: Any) -> tuple[PhaseArgs, Tensor | None, Tensor | None]:
    """The angles, and the rotated queries and keys where the angles are learned."""
    args, *rotated = saved_record(ctx)
    q, k = (*rotated, None, None)[:2]
    return args, q, k


def backward(ctx: Any, dq: Tensor, dk: Tensor) -> dict[str, Tensor | None]:
    args, q, k = read_saved(ctx)
    if torch.is_grad_enabled():
        dq, dk, dangle = differentiable_backward(ctx, dq, dk, q, k, args)
    else:
        dq, dk, dangle = backward_op(dq, dk, q, k, args, ctx.adjacent, not ctx.inverse)
    return {"q": dq.view(ctx.shape), "k": dk, "radians": of_radians(dangle, args)}


def qkv_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, Tensor | None]:
    args, q, k = read_saved(ctx)
    if torch.is_grad_enabled():
        dq, dk, dangle = differentiable_backward(ctx, dq, dk, q, k, args)
        dqkv = torch.cat((dq.unflatten(2, (dk.shape[2], -1)), dk.unsqueeze(3), dv.unsqueeze(3)), dim=3)
    else:
        dqkv, dangle = merge_op(dq, dk, dv, q, k, args, ctx.adjacent, not ctx.inverse)
    return {"qkv": dqkv, "radians": of_radians(dangle, args)}


def differentiable_backward(
    ctx: Any, dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, args: PhaseArgs
) -> tuple[Tensor, Tensor, Tensor]:
    """What `backward_op` gives, in operations that have derivatives: for second derivatives."""
    dangle = dq.new_zeros(())
    groups, pairs = args.phases.shape[2:]
    for dy, y in ((dq, q), (dk, k)):
        if y is not None:
            rotated = (x.float()[..., : 2 * pairs] for x in (dy, y))
            (du, dv), (u, v) = (split_pairs(x, "adjacent" if ctx.adjacent else "half") for x in rotated)
            dangle = dangle + (dv * u - du * v).unflatten(2, (groups, dy.shape[2] // groups)).sum(3)
    return *phase_op(dq, dk, args, ctx.adjacent, not ctx.inverse), -dangle if ctx.inverse else dangle


def of_radians(dangle: Tensor, args: PhaseArgs) -> Tensor | None:
    """The gradient of the angles `[B, T, groups, pairs]`, summed over rows that share them."""
    return None if args.radians is None else dangle.sum_to_size(args.radians.shape)


phase_op.register_autograd(backward, setup_context=setup_context)
phase_qkv_op.register_autograd(qkv_backward, setup_context=setup_context)
