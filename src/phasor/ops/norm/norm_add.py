"""The norm of a branch added to the residual stream, and the norm of the sum: norms after and before sub-layers.

Both norms have the same `eps`, `offset` and `centered`. The kernel rounds the sum and its norm, nothing before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import Dispatch, Path, eager_kernel_why_not
from phasor.ops.norm.norm import (
    DEFAULT_OPTIONS,
    TORCH_NORM,
    NormOptions,
    empty_stats,
    gradient_dtype,
    norm_backward_op,
    output_dtype,
    rows_why_not,
    split_gradients,
)


def norm_add(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> Tensor:
    """`x + norm(branch)`.

    >>> norm_add(torch.ones(2), torch.tensor([3.0, -3.0]), torch.ones(2), None, eps=0.0).tolist()
    [2.0, 0.0]
    """
    total: Tensor = NORM_ADD(x, branch, weight, bias, NormOptions(eps, offset, centered))
    return total


def norm_add_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x + norm(branch)` and its norm, by `next_weight` and `next_bias`.

    >>> x, branch, ones = torch.tensor([1.0, 3.0]), torch.tensor([3.0, -3.0]), torch.ones(2)
    >>> total, y = norm_add_norm(x, branch, ones, None, 5 * ones, None, eps=0.0)
    >>> total.tolist(), y.tolist()
    ([2.0, 2.0], [5.0, 5.0])
    """
    both: tuple[Tensor, Tensor] = NORM_ADD_NORM(
        x, branch, weight, bias, next_weight, next_bias, NormOptions(eps, offset, centered)
    )
    return both


def norm_add_why_not(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions = DEFAULT_OPTIONS,
) -> str | None:
    """Why the Triton kernel does not add this norm of a branch; None where it does."""
    if x.shape != branch.shape:
        return "the summands have different shapes"
    reason = eager_kernel_why_not("norm with offset" if options.offset else "norm", x, branch)
    return reason or rows_why_not(branch, weight, bias)


def norm_add_norm_why_not(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    options: NormOptions = DEFAULT_OPTIONS,
) -> str | None:
    """Why the Triton kernel does not compute this sum and its norm; None where it does."""
    if (weight is None, bias is None) != (next_weight is None, next_bias is None):
        return "only one of the norms has a weight, or a bias"
    reason = norm_add_why_not(x, branch, weight, bias, options)
    return reason or rows_why_not(x, next_weight, next_bias)


def norm_add_kernel(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
) -> Tensor:
    total: Tensor = norm_add_op(x, branch, weight, bias, options, sum_dtype(x, branch, options.offset))[0]
    return total


def norm_add_norm_kernel(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    dtype = sum_dtype(x, branch, options.offset)
    total, y, _ = norm_add_norm_op(x, branch, weight, bias, next_weight, next_bias, options, dtype)
    return total, y


def sum_dtype(x: Tensor, branch: Tensor, offset: float) -> torch.dtype:
    """The dtype of the sum, and of its norm, in the reference."""
    return torch.promote_types(x.dtype, output_dtype(branch, offset))


def add_torch_norm_of_branch(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
) -> Tensor:
    """The norm by torch, then the sum."""
    total: Tensor = x + TORCH_NORM(branch, weight, bias, options)
    return total


def torch_norms_around_sum(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    """The norm by torch, the sum, and its norm by torch."""
    total = x + TORCH_NORM(branch, weight, bias, options)
    return total, TORCH_NORM(total, next_weight, next_bias, options)


NORM_ADD = Dispatch(
    Path("Triton kernel", norm_add_kernel, norm_add_why_not),
    Path("torch, norm and then sum", add_torch_norm_of_branch),
)
NORM_ADD_NORM = Dispatch(
    Path("Triton kernel", norm_add_norm_kernel, norm_add_norm_why_not),
    Path("torch, norm, sum and norm", torch_norms_around_sum),
)


@custom_op("phasor::norm_add")
def norm_add_op(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The sum, and of each row of the branch what the gradient needs."""
    from phasor.ops.norm.kernels import norm_add_forward

    total, _, stats = norm_add_forward(x, branch, weight, bias, None, None, False, *options, dtype)
    return total, stats


@norm_add_op.register_fake
def _(x: Tensor, branch: Tensor, weight: Any, bias: Any, options: NormOptions, dtype: torch.dtype) -> Any:
    return x.new_empty(x.shape, dtype=dtype), empty_stats(x, 1 + options.centered)


@custom_op("phasor::norm_add_norm")
def norm_add_norm_op(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    options: NormOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and of each row of both norms what the gradient needs."""
    from phasor.ops.norm.kernels import norm_add_forward

    total, y, stats = norm_add_forward(x, branch, weight, bias, next_weight, next_bias, True, *options, dtype)
    assert y is not None
    return total, y, stats


@norm_add_norm_op.register_fake
def _(
    x: Tensor,
    branch: Tensor,
    weight: Any,
    bias: Any,
    next_weight: Any,
    next_bias: Any,
    options: NormOptions,
    dtype: torch.dtype,
) -> Any:
    total = x.new_empty(x.shape, dtype=dtype)
    return total, torch.empty_like(total), empty_stats(x, 2 * (1 + options.centered))


@custom_op("phasor::norm_add_norm_backward")
def norm_add_norm_backward_op(
    dtotal: Tensor | None,
    dy: Tensor,
    branch: Tensor,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    stats: Tensor,
    options: NormOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` and branch, and those of weights and biases, the branch's first: `[0..4, D]`."""
    from phasor.ops.norm.kernels import norm_add_norm_backward

    dtype = gradient_dtype(weight, bias, next_weight)
    return norm_add_norm_backward(dtotal, dy, branch, total, weight, bias, next_weight, stats, *options[1:], dtype)


@norm_add_norm_backward_op.register_fake
def _(dtotal: Any, dy: Tensor, branch: Tensor, total: Tensor, weight: Any, bias: Any, next_weight: Any, *_: Any) -> Any:
    weights = 2 * ((weight is not None) + (bias is not None))
    sums = branch.new_empty((weights, branch.shape[-1]), dtype=gradient_dtype(weight, bias, next_weight))
    return total.new_empty(total.shape), branch.new_empty(branch.shape), sums


def _norm_add_setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    _, stats = output
    ctx.options, ctx.dtype = inputs.options, inputs.x.dtype
    ctx.save_for_backward(inputs.branch, inputs.weight, inputs.bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _norm_add_backward(ctx: Any, dtotal: Tensor | None, _: None) -> dict[str, Tensor | None]:
    if dtotal is None:
        return {}
    branch, weight, bias, stats = ctx.saved_tensors
    dbranch, sums = norm_backward_op(dtotal, None, branch, weight, bias, stats, ctx.options)
    return {"x": dtotal.to(ctx.dtype), "branch": dbranch, **split_gradients(sums, weight=weight, bias=bias)}


def _norm_add_norm_setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, stats = output
    ctx.options, ctx.dtype = inputs.options, inputs.x.dtype
    weights = inputs.weight, inputs.bias, inputs.next_weight, inputs.next_bias
    ctx.save_for_backward(inputs.branch, total, stats, *weights)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _norm_add_norm_backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, _: None) -> dict[str, Tensor | None]:
    branch, total, stats, weight, bias, next_weight, next_bias = ctx.saved_tensors
    weights = {"weight": weight, "bias": bias}
    if dy is not None:
        dx, dbranch, sums = norm_add_norm_backward_op(
            dtotal, dy, branch, total, weight, bias, next_weight, stats, ctx.options
        )
        weights |= {"next_weight": next_weight, "next_bias": next_bias}
    elif dtotal is not None:
        dx = dtotal
        dbranch, sums = norm_backward_op(dtotal, None, branch, weight, bias, stats, ctx.options)
    else:
        return {}
    return {"x": dx.to(ctx.dtype), "branch": dbranch, **split_gradients(sums, **weights)}


norm_add_op.register_autograd(_norm_add_backward, setup_context=_norm_add_setup_context)
norm_add_norm_op.register_autograd(_norm_add_norm_backward, setup_context=_norm_add_norm_setup_context)
