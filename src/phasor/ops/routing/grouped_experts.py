"""All that follows the router as one operation for training: one node of the graph, and its gradient by hand.

The activation is not saved for the backward pass: the kernel that computes its gradient recomputes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op

CLAMPED = "swiglu-clamped"


@custom_op("phasor::grouped_experts")
def grouped_experts_op(
    tokens: Tensor,
    logits: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    top_k: int,
    normalize: bool,
    activation: str,
    limit: float,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The routed experts of tokens, and what the gradient needs.

    That is the rows of every expert, their up projection, their result, the weights of choices, the row of each, and
    where the rows of each expert end.
    """
    from phasor.ops.glu.kernels import glu_forward
    from phasor.ops.routing.kernels import add_bias, clamped_swiglu, combine, gather, sort_choices

    weights, rows, ends = sort_choices(logits, top_k, normalize)
    x = gather(tokens, rows)
    hidden = F.grouped_mm(x, up, offs=ends)
    if activation == CLAMPED:
        active = clamped_swiglu(hidden, up_bias, ends, limit, gain)
    else:
        hidden = hidden if up_bias is None else add_bias(hidden, up_bias, ends)
        active = glu_forward(hidden, activation)
    out = F.grouped_mm(active, down, offs=ends)
    return combine(out, down_bias, weights, rows, ends), x, hidden, out, weights, rows, ends


@grouped_experts_op.register_fake
def _(
    tokens: Tensor, logits: Tensor, up: Tensor, down: Tensor, up_bias: Any, down_bias: Any, top_k: int, *_: Any
) -> Any:
    count, dim = tokens.shape
    sizes = dim, up.shape[2], dim
    weights = logits.new_empty((count, top_k), dtype=torch.float32)
    results = (tokens.new_empty((count * top_k, size)) for size in sizes)
    ends = logits.new_empty(len(up), dtype=torch.int32)
    return tokens.new_empty(tokens.shape), *results, weights, torch.empty_like(weights, dtype=torch.int32), ends


@custom_op("phasor::grouped_experts_backward")
def grouped_experts_backward_op(
    dy: Tensor,
    logits: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    x: Tensor,
    hidden: Tensor,
    out: Tensor,
    weights: Tensor,
    rows: Tensor,
    ends: Tensor,
    normalize: bool,
    activation: str,
    limit: float,
    gain: float,
    needs_weights: bool,
) -> list[Tensor]:
    """The gradients of tokens and logits; with `needs_weights` also of `up`, `down` and the biases there are."""
    from phasor.ops.glu.kernels import glu_backward
    from phasor.ops.routing.kernels import clamped_swiglu_backward, combine, combine_backward, expert_sums

    dout, dlogits = combine_backward(dy, out, down_bias, logits, weights, rows, ends, normalize)
    active = F.grouped_mm(dout, down.mT, offs=ends)
    # The kernel overwrites the gradient of the activation by the activation, which the weight's gradient needs.
    if activation == CLAMPED:
        dhidden = clamped_swiglu_backward(active, hidden, up_bias, ends, limit, gain, output=active)
    else:
        dhidden = glu_backward(active, hidden, activation, output=active)
    dtokens = combine(F.grouped_mm(dhidden, up.mT, offs=ends), None, None, rows, None)
    if not needs_weights:
        return [dtokens, dlogits]
    dup, ddown = F.grouped_mm(x.t(), dhidden, offs=ends), F.grouped_mm(active.t(), dout, offs=ends)
    of_biases = [
        expert_sums(grad, ends, bias.dtype)
        for grad, bias in ((dhidden, up_bias), (dout, down_bias))
        if bias is not None
    ]
    return [dtokens, dlogits, dup, ddown, *of_biases]


@grouped_experts_backward_op.register_fake
def _(
    dy: Tensor, logits: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    of = [dy, logits, *(w for w in (up, down, up_bias, down_bias) if w is not None)]
    return [w.new_empty(w.shape) for w in (of if rest[-1] else of[:2])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, logits, up, down, up_bias, down_bias, _, *ctx.options = inputs
    ctx.save_for_backward(logits, up, down, up_bias, down_bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    needs_weights = any(ctx.needs_input_grad[2:6])
    dtokens, dlogits, *of_weights = grouped_experts_backward_op(dy, *saved, *ctx.options, needs_weights)
    gradients = iter(of_weights)
    weights = (next(gradients) if w is not None and needs_weights else None for w in saved[1:5])
    return dtokens, dlogits, *weights, None, None, None, None, None


grouped_experts_op.register_autograd(_backward, setup_context=_setup_context)
