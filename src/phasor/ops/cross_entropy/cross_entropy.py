"""Cross-entropy of `softcap(multiplier * (h W^T + b))` that never holds the logits of all rows.

The fast paths go over the rows in chunks. The logits of a chunk are overwritten by their gradient, which is multiplied
into the gradients of `h` and `W` at once; the backward pass only scales those. A Triton kernel computes the loss and
gradient of a chunk where one can run, plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.ops.cross_entropy.reference import (
    LossSums,
    cross_entropy_ref,
    linear_cross_entropy_ref,
    sum_dtype,
    weighted_sum,
)
from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import KERNEL_DTYPES, Dispatch, Path, functional_transform_why_not, triton_why_not

MAX_LOGITS_AT_ONCE = 2**26  # 256 MiB in float32: without a kernel, fewer are as fast at once as in chunks


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> LossSums:
    """The cross-entropy of rows `hidden [N, dim]` with logits by the table `weight [V, dim]`, weighted and summed.

    `targets` is int64 `[N]`, and `weights [N]` says how much each row counts; rows of weight 0 count for nothing, even
    if their logits are not finite. `label_smoothing` spreads that share of the target evenly over the vocabulary.
    Under autocast the logits have its dtype; sums are in at least float32. There is no second derivative.

    >>> sums = linear_cross_entropy(torch.zeros(3, 4), torch.randn(8, 4), torch.arange(3), torch.ones(3))
    >>> round(float(sums.loss) / 3, 4)  # the log of 8
    2.0794
    """
    sums: LossSums = CROSS_ENTROPY(hidden, weight, bias, targets, weights, label_smoothing, z_loss, multiplier, softcap)
    return sums


def kernel_why_not(hidden: Tensor, weight: Tensor, *_: Any) -> str | None:
    """Why the Triton kernel does not compute the loss of each chunk; None where it does.

    >>> kernel_why_not(torch.zeros(7, 4), torch.zeros(9, 4))
    'the tensors are not on a GPU'
    """
    dtype = logits_dtype(hidden, weight)
    if dtype not in KERNEL_DTYPES:
        return f"logits in {str(dtype)[6:]} have no kernel"
    return triton_why_not(hidden)


def chunks_why_not(hidden: Tensor, weight: Tensor, *_: Any) -> str | None:
    """Why plain torch holds the logits of all rows at once; None where it takes them in chunks.

    >>> chunks_why_not(torch.zeros(7, 4), torch.zeros(9, 4))
    'the logits are few, and as fast all at once'
    >>> chunks_why_not(torch.zeros(2**13, 1), torch.zeros(2**13, 1)) is None
    True
    """
    reason = functional_transform_why_not()
    if reason is not None:
        return reason
    few = hidden.shape[0] * weight.shape[0] < MAX_LOGITS_AT_ONCE
    return "the logits are few, and as fast all at once" if few else None


def kernel_chunks(*args: Any) -> LossSums:
    """The sums in chunks of rows, by the Triton kernel."""
    return chunk_sums(*args, use_kernel=True)


def torch_chunks(*args: Any) -> LossSums:
    """The sums in chunks of rows, in plain torch."""
    return chunk_sums(*args, use_kernel=False)


def chunk_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    label_smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    *,
    use_kernel: bool,
) -> LossSums:
    enabled = torch.is_grad_enabled()
    needs_grad = [enabled and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    dtype = logits_dtype(hidden, weight)
    options = CrossEntropyOptions(label_smoothing, z_loss, multiplier, softcap, dtype, needs_grad, None, use_kernel)
    loss, cross_entropy, z, *_ = linear_cross_entropy_op(hidden, weight, bias, targets, weights, options)
    return LossSums(loss, cross_entropy, z)


CROSS_ENTROPY = Dispatch(
    Path("Triton kernel in chunks of rows", kernel_chunks, kernel_why_not),
    Path("torch in chunks of rows", torch_chunks, chunks_why_not),
    Path("torch over all logits at once", linear_cross_entropy_ref),
)


def chunk_size(rows: int, vocab_size: int, on_cpu: bool) -> int:
    """How many rows make a chunk: a few hundred megabytes of logits, enough for matmuls at full throughput.

    >>> chunk_size(16384, 32000, False), chunk_size(16384, 128256, False), chunk_size(100, 32000, False)
    (4096, 2048, 100)
    """
    most = max(2**24 // vocab_size, 256) if on_cpu else max(2**27 // vocab_size, 2048)
    even = -(-rows // -(-rows // most)) if rows else 1  # chunks of about the same size
    return min(-(-even // 128) * 128, max(rows, 1))


def logits_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the logits: autocast's where it is enabled."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def saved_grad_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which the table's gradient waits for the backward pass; float16 would overflow over many rows."""
    return weight.dtype if weight.dtype == torch.bfloat16 else sum_dtype(weight.dtype)


class CrossEntropyOptions(NamedTuple):
    """What the loss is, the dtype of its logits, and how it is computed.

    `needs_grad` says whether hidden, weight and bias need a gradient. A chunk has `chunk_rows` rows if that is given.
    """

    label_smoothing: float
    z_loss: float
    multiplier: float
    softcap: float | None
    dtype: torch.dtype
    needs_grad: Sequence[bool]
    chunk_rows: int | None
    use_kernel: bool


@custom_op("phasor::linear_cross_entropy")
def linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    options: CrossEntropyOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and z, then the loss's gradients of hidden, weight and bias, empty where not needed."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = cross_entropy_ref
    label_smoothing, z_loss, multiplier, softcap, dtype, needs_grad, chunk_rows, use_kernel = options
    if use_kernel:
        from phasor.ops.cross_entropy import kernels

        cross_entropy = kernels.cross_entropy
    count, vocab_size = len(hidden), len(weight)
    step = chunk_rows or chunk_size(count, vocab_size, hidden.device.type == "cpu")
    new = torch.empty if count else torch.zeros
    wide: dict[str, Any] = {"dtype": sum_dtype(dtype), "device": hidden.device}
    losses, lse = new(count, **wide), new(count, **wide)
    dhidden = new(hidden.shape if needs_grad[0] else 0, dtype=dtype, device=hidden.device)
    dweight = new(weight.shape if needs_grad[1] else 0, **wide)
    dbias = torch.zeros(vocab_size if needs_grad[2] else 0, **wide)
    with torch.autocast(hidden.device.type, enabled=False):
        h, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        buffer = torch.empty(min(step, count), vocab_size, dtype=dtype, device=hidden.device)
        for start in range(0, count, step):
            chunk = slice(start, start + step)
            logits = buffer[: min(step, count - start)]
            torch.mm(h[chunk], w.t(), out=logits) if b is None else torch.addmm(b, h[chunk], w.t(), out=logits)
            losses[chunk], lse[chunk] = cross_entropy(
                logits, targets[chunk], weights[chunk], label_smoothing, z_loss, multiplier, softcap, any(needs_grad)
            )
            # From here on `logits` holds their gradient.
            if needs_grad[0]:
                torch.mm(logits, w, out=dhidden[chunk])
            if needs_grad[1]:
                accumulate_matmul(dweight, logits.t(), h[chunk], first=start == 0)
            if needs_grad[2]:
                dbias += logits.sum(0, dtype=dbias.dtype)
            del logits
        del buffer  # before the table's gradient is copied into its own dtype: memory is at its peak here
    cross_entropy_sum = weighted_sum(losses, weights)
    z = weighted_sum(lse**2, weights) if z_loss else losses.new_zeros(())
    return cross_entropy_sum + z_loss * z, cross_entropy_sum, z, dhidden, dweight.to(saved_grad_dtype(weight)), dbias


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, weights: Tensor, options: CrossEntropyOptions
) -> tuple[Tensor, ...]:
    dtype, needs_grad = options.dtype, options.needs_grad
    sums = [hidden.new_empty((), dtype=sum_dtype(dtype)) for _ in range(3)]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (dtype, saved_grad_dtype(weight), sum_dtype(dtype))
    return (
        *sums,
        *(hidden.new_empty(s if n else (0,), dtype=t) for s, t, n in zip(shapes, dtypes, needs_grad, strict=True)),
    )


def accumulate_matmul(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total += a b`, or `total = a b` at first. A GPU accumulates float16 and bfloat16 in float32 all the way."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [None if x is None else x.dtype for x in (inputs.hidden, inputs.weight, inputs.bias)]
    ctx.needs_grad = inputs.options.needs_grad
    _, cross_entropy, z, *grads = output
    ctx.save_for_backward(*grads)
    ctx.mark_non_differentiable(cross_entropy, z, *grads)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> dict[str, Tensor | None]:
    names = "hidden", "weight", "bias"
    saved = zip(names, ctx.saved_tensors, ctx.dtypes, ctx.needs_grad, strict=True)
    return {name: scale_op(grad, dloss, dtype) for name, grad, dtype, needed in saved if needed and dloss is not None}


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


@custom_op("phasor::scale")
def scale_op(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` times a scalar in float32, in one pass for all dtypes; a 0-d factor would be rounded first."""
    return torch.mul(x, factor.view((1,) * x.dim()), out=torch.empty_like(x, dtype=dtype))


@scale_op.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
