"""Linear attention by Triton kernels, as a torch operation with its gradient; nothing imports Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import needs_grad, triton_why_not
from phasor.ops.linear_attention.arguments import LinearAttentionArgs

MAX_KEY_DIM = 256  # all features of keys are in one tile


def kernel_why_not(args: LinearAttentionArgs) -> str | None:
    """Why the kernels of chunks do not compute this; None where they do."""
    q, k, v = args[:3]
    reason = triton_why_not(q, k, v)
    if reason is not None:
        return reason
    if v.dtype not in (torch.float32, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(str(x.dtype)[6:] for x in (q, k, v))
        return f"queries, keys and values are {dtypes}, and not all float32 or all bfloat16"
    if k.shape[-1] > MAX_KEY_DIM:
        return f"a key has {k.shape[-1]} features, more than {MAX_KEY_DIM}"
    return "there are no tokens" if v.numel() == 0 else None


def gated_delta_kernel(args: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """The gated delta rule, or without `strength` retention."""
    state = None if args.state is None else args.state.float()
    out, final, *_ = linear_attention_op(args._replace(state=state))
    return out, final


@custom_op("phasor::linear_attention")
def linear_attention_op(args: LinearAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and the last state, then inverses, writings and states for the backward pass."""
    from phasor.ops.linear_attention import kernel_launch

    return kernel_launch.forward(args)


@linear_attention_op.register_fake
def _(args: LinearAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    v, shape, is_delta = args.v, args.v.shape, args.strength is not None
    per_state = args.k.shape[-1], shape[-1]
    return (
        v.new_empty(shape),
        v.new_empty(*shape[:2], *per_state, dtype=torch.float32),
        v.new_empty((*shape[:3], args.chunk) if is_delta else 0),
        v.new_empty(shape if is_delta else 0),
        v.new_empty(*shape[:2], -(-shape[2] // args.chunk), *per_state),
    )


@custom_op("phasor::linear_attention_backward")
def linear_attention_backward_op(
    do: Tensor, dfinal: Tensor | None, inverse: Tensor, z: Tensor, states: Tensor, args: LinearAttentionArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, log decays, strengths (empty for retention) and of the first state."""
    from phasor.ops.linear_attention import kernel_launch

    return kernel_launch.backward(do, dfinal, args, inverse, z, states)


@linear_attention_backward_op.register_fake
def _(
    do: Tensor, dfinal: Tensor | None, inverse: Tensor, z: Tensor, states: Tensor, args: LinearAttentionArgs
) -> tuple[Tensor, ...]:
    q, k, v, g = args.q, args.k, args.v, args.log_decay
    dbeta = g.new_empty(g.shape if args.strength is not None else 0, dtype=torch.float32)
    dstate = v.new_empty(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), g.new_empty(g.shape, dtype=torch.float32), dbeta, dstate


def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Keep the arguments and what the forward kernels left for the backward pass."""
    save_record(ctx, inputs.args, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None) -> dict[str, Tensor | None]:
    """The gradients of all inputs of `linear_attention_op` that have one."""
    args, inverse, z, states = saved_record(ctx)
    do = torch.zeros_like(args.v) if do is None else do
    grads = linear_attention_backward_op(do, dfinal, inverse, z, states, args)
    by_name = dict(zip(args._fields, grads, strict=False))
    given = ((name, getattr(args, name)) for name in by_name)
    return {name: None if x is None else by_name[name].to(x.dtype) for name, x in given}


linear_attention_op.register_autograd(backward, setup_context=setup_context)


def step_why_not(args: LinearAttentionArgs) -> str | None:
    """Why the kernel of one token does not compute this; None where it does."""
    state, reason = args.state, kernel_why_not(args)
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():
        return "the kernel writes into its arguments, which a compiler does not see"
    assert state is not None
    if state.dtype != torch.float32 or not state.is_contiguous():
        return "the state is not contiguous in float32"
    return "a gradient is needed" if needs_grad(*args[:6]) else None


def step_in_place(args: LinearAttentionArgs) -> Tensor:
    """The output of one token, whose state replaces the one given."""
    from phasor.ops.linear_attention.step_kernel import step

    return step(args)
