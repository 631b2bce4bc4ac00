"""All that follows the router as one operation for training: one node of the graph, and its gradient by hand.

The activation is not saved for the backward pass: the kernel that computes its gradient recomputes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.routing.arguments import CombineArgs

CLAMPED = "swiglu-clamped"
WEIGHTS = "up", "down", "up_bias", "down_bias"


class GroupedExpertsArgs(NamedTuple):
    """The logits of the router, matrices `[experts, in, out]` with their biases, and the activation between them.

    `limit` and `gain` are those of the activation "swiglu-clamped".
    """

    logits: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    top_k: int
    normalize: bool
    activation: str
    limit: float
    gain: float


class GroupedExpertsState(NamedTuple):
    """What the gradient needs of the forward pass.

    That is the rows of every expert, their up projection, their result, the weights of choices, the row of each, and
    where the rows of each expert end.
    """

    x: Tensor
    hidden: Tensor
    out: Tensor
    weights: Tensor
    rows: Tensor
    ends: Tensor


@custom_op("phasor::grouped_experts")
def grouped_experts_op(
    tokens: Tensor, args: GroupedExpertsArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The routed experts of tokens, and the fields of `GroupedExpertsState`."""
    from phasor.ops.glu.kernels import glu_forward
    from phasor.ops.routing.kernels import add_bias, clamped_swiglu, combine, gather, sort_choices

    weights, rows, ends = sort_choices(args.logits, args.top_k, args.normalize)
    x = gather(tokens, rows)
    hidden = F.grouped_mm(x, args.up, offs=ends)
    if args.activation == CLAMPED:
        active = clamped_swiglu(hidden, args.up_bias, ends, args.limit, args.gain)
    else:
        hidden = hidden if args.up_bias is None else add_bias(hidden, args.up_bias, ends)
        active = glu_forward(hidden, args.activation)
    out = F.grouped_mm(active, args.down, offs=ends)
    return combine(out, args.down_bias, weights, rows, ends), x, hidden, out, weights, rows, ends


@grouped_experts_op.register_fake
def _(tokens: Tensor, args: GroupedExpertsArgs) -> Any:
    count, dim = tokens.shape
    sizes = dim, args.up.shape[2], dim
    weights = args.logits.new_empty((count, args.top_k), dtype=torch.float32)
    results = (tokens.new_empty((count * args.top_k, size)) for size in sizes)
    ends = args.logits.new_empty(len(args.up), dtype=torch.int32)
    return tokens.new_empty(tokens.shape), *results, weights, torch.empty_like(weights, dtype=torch.int32), ends


@custom_op("phasor::grouped_experts_backward")
def grouped_experts_backward_op(
    dy: Tensor, args: GroupedExpertsArgs, state: GroupedExpertsState, needs_weights: bool
) -> list[Tensor]:
    """The gradients of tokens and logits; with `needs_weights` also of `up`, `down` and the biases there are."""
    from phasor.ops.glu.kernels import glu_backward
    from phasor.ops.routing.kernels import clamped_swiglu_backward, combine, combine_backward, expert_sums

    x, hidden, out, weights, rows, ends = state
    combined = CombineArgs(out, args.down_bias, args.logits, weights, rows, ends, args.normalize)
    dout, dlogits = combine_backward(dy, combined)
    active = F.grouped_mm(dout, args.down.mT, offs=ends)
    # The kernel overwrites the gradient of the activation by the activation, which the weight's gradient needs.
    if args.activation == CLAMPED:
        dhidden = clamped_swiglu_backward(active, hidden, args.up_bias, ends, args.limit, args.gain, output=active)
    else:
        dhidden = glu_backward(active, hidden, args.activation, output=active)
    dtokens = combine(F.grouped_mm(dhidden, args.up.mT, offs=ends), None, None, rows, None)
    if not needs_weights:
        return [dtokens, dlogits]
    dup, ddown = F.grouped_mm(x.t(), dhidden, offs=ends), F.grouped_mm(active.t(), dout, offs=ends)
    of_biases = [
        expert_sums(grad, ends, bias.dtype)
        for grad, bias in ((dhidden, args.up_bias), (dout, args.down_bias))
        if bias is not None
    ]
    return [dtokens, dlogits, dup, ddown, *of_biases]


@grouped_experts_backward_op.register_fake
def _(dy: Tensor, args: GroupedExpertsArgs, state: GroupedExpertsState, needs_weights: bool) -> list[Tensor]:
    weights = [getattr(args, name) for name in WEIGHTS if getattr(args, name) is not None] if needs_weights else []
    return [x.new_empty(x.shape) for x in (dy, args.logits, *weights)]


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    _, *state = output
    save_record(ctx, inputs.args, *state)
    ctx.mark_non_differentiable(*state)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> dict[str, Tensor | None]:
    if dy is None:
        return {}
    args, *state = saved_record(ctx)
    needs_weights = grouped_experts_op.needs_grad(ctx, *WEIGHTS)
    grads = grouped_experts_backward_op(dy, args, GroupedExpertsState(*state), needs_weights)
    given = [name for name in WEIGHTS if getattr(args, name) is not None] if needs_weights else []
    return dict(zip(("tokens", "logits", *given), grads, strict=True))


grouped_experts_op.register_autograd(_backward, setup_context=_setup_context)
