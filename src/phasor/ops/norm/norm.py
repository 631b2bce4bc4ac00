"""RMSNorm and LayerNorm over the last dimension, computed in at least float32 for any dtype.

`centered` subtracts the mean first (LayerNorm; without it, RMSNorm). The result is scaled by `offset + weight`.
`add_norm` also returns the sum that it normalizes, so the residual stream is written once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import Dispatch, Path, eager_kernel_why_not
from phasor.ops.norm.reference import norm_ref

MAX_WIDTH = 2**14  # a row has to fit into the registers of one program


class NormOptions(NamedTuple):
    """What is added to the mean square, what to the weight, and whether the mean is subtracted first."""

    eps: float = 0.0
    offset: float = 0.0
    centered: bool = False


DEFAULT_OPTIONS = NormOptions()


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, offset: float = 0.0, centered: bool = False
) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, or `x / sqrt(mean(x^2) + eps) * (offset + weight) + bias`.

    >>> norm(torch.tensor([3.0, -3.0]), torch.ones(2), None, eps=0.0).tolist()
    [1.0, -1.0]
    """
    y: Tensor = NORM(x, weight, bias, NormOptions(eps, offset, centered))
    return y


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x + residual` and its norm, each written once.

    >>> total, y = add_norm(torch.tensor([1.0, -2.0]), torch.tensor([2.0, -1.0]), torch.ones(2), None, eps=0.0)
    >>> total.tolist(), y.tolist()
    ([3.0, -3.0], [1.0, -1.0])
    """
    total: tuple[Tensor, Tensor] = ADD_NORM(x, residual, weight, bias, NormOptions(eps, offset, centered))
    return total


def norm_why_not(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions = DEFAULT_OPTIONS
) -> str | None:
    """Why the Triton kernel does not compute this norm; None where it does."""
    return eager_kernel_why_not("norm with offset" if options.offset else "norm", x) or rows_why_not(x, weight, bias)


def add_norm_why_not(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions = DEFAULT_OPTIONS,
) -> str | None:
    """Why the Triton kernel does not compute this sum and its norm; None where it does."""
    if x.shape != residual.shape:
        return "the summands have different shapes"
    reason = eager_kernel_why_not("norm with offset" if options.offset else "norm", x, residual)
    return reason or rows_why_not(x, weight, bias)


def rows_why_not(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why the Triton kernel does not normalize rows like these; None where it does."""
    if has_weights_by_head(weight, bias):
        return "each head has its own weights"
    if x.shape[-1] > MAX_WIDTH:
        return f"a row of {x.shape[-1]} elements is wider than {MAX_WIDTH}"
    return None


def has_weights_by_head(weight: Tensor | None, bias: Tensor | None) -> bool:
    return (weight is not None and weight.dim() > 1) or (bias is not None and bias.dim() > 1)


def norm_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    y: Tensor = norm_op(x, weight, bias, options, output_dtype(x, options.offset))[0]
    return y


def add_norm_kernel(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    dtype = output_dtype(x, options.offset)
    total, y, _ = add_norm_op(x, residual, weight, bias, options, dtype)
    return total, y


def torch_norm_why_not(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> str | None:
    """Why `F.layer_norm` and `torch.rms_norm` do not compute this norm; None where one of them does."""
    if options.offset:
        return "torch's own norms add nothing to their weight"
    if has_weights_by_head(weight, bias):
        return "each head has its own weights"
    given = [w for w in (weight, bias) if w is not None]
    for w in given:
        if w.dtype != x.dtype and w.element_size() < x.element_size():
            return "weight or bias is less precise than what it is applied to"
    if not options.centered:
        return None if bias is None else "torch's own RMSNorm has no bias"
    return None if layer_norm_takes(x, given) else "torch's own LayerNorm does not take these dtypes together"


def layer_norm_takes(x: Tensor, weights: list[Tensor]) -> bool:
    """Whether `F.layer_norm` takes weights and bias of these dtypes.

    >>> half, single = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    >>> layer_norm_takes(half, [half, half]), layer_norm_takes(half, [single, single])
    (True, True)
    >>> layer_norm_takes(half, [single, half])
    False
    """
    if all(w.dtype == x.dtype for w in weights):
        return True
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return True  # it takes everything as float32
    return x.is_cpu and all(w.dtype == torch.float32 for w in weights)


def torch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    """The norm as one operation of torch."""
    shape = x.shape[-1:]
    if options.centered:
        return F.layer_norm(x, shape, weight, bias, options.eps)
    return torch.rms_norm(x, shape, weight, options.eps)


def add_torch_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    """The sum, then its norm by torch."""
    total = x + residual
    return total, TORCH_NORM(total, weight, bias, options)


TORCH_NORM = Dispatch(
    Path("one operation of torch", torch_norm, torch_norm_why_not),
    Path("torch in float32, then the weight", lambda x, weight, bias, options: norm_ref(x, weight, bias, *options)),
)
NORM = Dispatch(Path("Triton kernel", norm_kernel, norm_why_not), *TORCH_NORM.paths)
ADD_NORM = Dispatch(
    Path("Triton kernel", add_norm_kernel, add_norm_why_not), Path("torch, sum and then norm", add_torch_norm)
)


def output_dtype(x: Tensor, offset: float) -> torch.dtype:
    """The dtype of the reference: under autocast torch's own norms, which have no offset, return float32."""
    return torch.float32 if not offset and torch.is_autocast_enabled(x.device.type) else x.dtype


@custom_op("phasor::norm")
def norm_op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The norm, and of each row what the gradient needs: the reciprocal scale, and the mean if centered."""
    from phasor.ops.norm.kernels import norm_forward

    _, y, stats = norm_forward(x, None, weight, bias, *options, dtype)
    return y, stats


@norm_op.register_fake
def _(x: Tensor, weight: Any, bias: Any, options: NormOptions, dtype: torch.dtype) -> Any:
    return x.new_empty(x.shape, dtype=dtype), empty_stats(x, 1 + options.centered)


@custom_op("phasor::add_norm")
def add_norm_op(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and of each row what the gradient needs."""
    from phasor.ops.norm.kernels import norm_forward

    total, y, stats = norm_forward(x, residual, weight, bias, *options, dtype)
    assert total is not None
    return total, y, stats


@add_norm_op.register_fake
def _(x: Tensor, residual: Tensor, weight: Any, bias: Any, options: NormOptions, dtype: Any) -> Any:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return total, x.new_empty(x.shape, dtype=dtype), empty_stats(x, 1 + options.centered)


def empty_stats(x: Tensor, per_row: int) -> Tensor:
    """What norms would store of the rows of `x`."""
    return x.new_empty((per_row, x.numel() // x.shape[-1]), dtype=torch.float32)


@custom_op("phasor::norm_backward")
def norm_backward_op(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    options: NormOptions,
) -> tuple[Tensor, Tensor]:
    """The gradient of `x`, to which `dtotal` is added, and those of weight and bias: `[0..2, D]`."""
    from phasor.ops.norm.kernels import norm_backward

    return norm_backward(
        dy, dtotal, x, weight, bias, stats, options.offset, options.centered, gradient_dtype(weight, bias)
    )


@norm_backward_op.register_fake
def _(dy: Tensor, dtotal: Any, x: Tensor, weight: Any, bias: Any, stats: Tensor, options: NormOptions) -> Any:
    shape = (weight is not None) + (bias is not None), x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(shape, dtype=gradient_dtype(weight, bias))


def gradient_dtype(*weights: Tensor | None) -> torch.dtype:
    """The dtype of all these weights; float32 where there are none, or of several dtypes.

    >>> gradient_dtype(None, torch.zeros(2, dtype=torch.bfloat16))
    torch.bfloat16
    """
    dtypes = {w.dtype for w in weights if w is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def split_gradients(sums: Tensor, **weights: Tensor | None) -> dict[str, Tensor | None]:
    """The gradient of each weight there is, from `sums [weights, D]`; autograd converts those of other dtypes.

    >>> split_gradients(torch.ones(1, 2), weight=None, bias=torch.zeros(2))
    {'bias': tensor([1., 1.])}
    """
    return dict(zip((name for name, w in weights.items() if w is not None), sums.unbind(), strict=True))


def _norm_setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    _, stats = output
    ctx.options = inputs.options
    ctx.save_for_backward(inputs.x, inputs.weight, inputs.bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _norm_backward(ctx: Any, dy: Tensor | None, _: None) -> dict[str, Tensor | None]:
    if dy is None:
        return {}
    x, weight, bias, stats = ctx.saved_tensors
    dx, sums = norm_backward_op(dy, None, x, weight, bias, stats, ctx.options)
    return {"x": dx, **split_gradients(sums, weight=weight, bias=bias)}


def _add_norm_setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, stats = output
    ctx.options, ctx.dtypes = inputs.options, {"x": inputs.x.dtype, "residual": inputs.residual.dtype}
    ctx.save_for_backward(total, inputs.weight, inputs.bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _add_norm_backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, _: None) -> dict[str, Tensor | None]:
    total, weight, bias, stats = ctx.saved_tensors
    of_weights: dict[str, Tensor | None] = {}
    dx = dtotal
    if dy is not None:
        dx, sums = norm_backward_op(dy, dtotal, total, weight, bias, stats, ctx.options)
        of_weights = split_gradients(sums, weight=weight, bias=bias)
    grads = {name: None if dx is None else dx.to(dtype) for name, dtype in ctx.dtypes.items()}
    return {**grads, **of_weights}


norm_op.register_autograd(_norm_backward, setup_context=_norm_setup_context)
add_norm_op.register_autograd(_add_norm_backward, setup_context=_add_norm_setup_context)
