"""Cross-entropy of `softcap(multiplier * (h W^T + b))` that never holds the logits of all rows.

The fast form goes over the rows in chunks. The logits of one chunk become their own gradient where they lie, which is
at once multiplied into the gradients of `h` and `W`; the backward pass then only scales those. The chunk is judged by
a Triton kernel where one can run, and in plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import custom_op

SMALL = 2**26  # logits, 256 MiB in float32: without a kernel so many are held at once, which is as quick
Judge = Callable[..., tuple[Tensor, Tensor]]


class LossSums(NamedTuple):
    """Sums over all rows, each times its weight.

    `cross_entropy` of `-log p`, `z` of the squared log of the partition (0 where no `z_loss` asks for it), and
    `loss = cross_entropy + z_loss * z`, through which gradients go.
    """

    loss: Tensor
    cross_entropy: Tensor
    z: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> LossSums:
    """The cross-entropy of rows `hidden [N, dim]` with logits by the table `weight [V, dim]`, weighted and summed.

    `targets` is int64 `[N]`, and `weights` says how much each row counts, `[N]`; rows of weight 0 count for nothing,
    even if their logits are not finite. `smoothing` spreads that share of the target evenly over the vocabulary. Under
    autocast the products are in its type; sums are in at least float32. There is no second derivative.

    >>> sums = linear_cross_entropy(torch.zeros(3, 4), torch.randn(8, 4), torch.arange(3), torch.ones(3))
    >>> round(float(sums.loss) / 3, 4)  # the log of 8
    2.0794
    """
    given = (smoothing, z_loss, multiplier, softcap)
    if why_not(hidden, weight) is not None:
        return linear_cross_entropy_ref(hidden, weight, bias, targets, weights, *given)
    grows = torch.is_grad_enabled()
    wanted = [grows and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    dtype = logits_dtype(hidden, weight)
    return LossSums(*_linear_cross_entropy(hidden, weight, bias, targets, weights, *given, dtype, wanted, None)[:3])


def why_not(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the logits of all rows are held at once; None where they are not.

    >>> why_not(torch.zeros(7, 4), torch.zeros(9, 4))
    'the logits are few, and the tensors are not on a GPU'
    >>> why_not(torch.zeros(2**13, 1), torch.zeros(2**13, 1)) is None
    True
    """
    if dispatch.functional_transform_why_not() is not None:
        return dispatch.functional_transform_why_not()
    reason = kernel_why_not(logits_dtype(hidden, weight), hidden)
    few = hidden.shape[0] * weight.shape[0] < SMALL
    return f"the logits are few, and {reason}" if few and reason is not None else None


def kernel_why_not(dtype: torch.dtype, *tensors: Tensor) -> str | None:
    """Why the Triton kernel does not judge logits of a type; None where it does."""
    if dtype not in dispatch.KERNEL_DTYPES:
        return f"logits in {str(dtype)[6:]} have no kernel"
    return dispatch.triton_why_not(*tensors)


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> LossSums:
    """The same with all logits at once."""
    logits = scale_and_softcap(F.linear(hidden, weight, bias), multiplier, softcap)
    return logits_cross_entropy(logits, targets, weights, smoothing, z_loss)


def logits_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> LossSums:
    """The same of logits `[N, V]` that are there already."""
    logits = logits.to(wide(logits.dtype))
    each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    cross_entropy = weighted_sum(each, weights)
    if not z_loss:
        return LossSums(cross_entropy, cross_entropy.detach(), torch.zeros_like(cross_entropy))
    z = weighted_sum(logits.logsumexp(-1) ** 2, weights)
    return LossSums(cross_entropy + z_loss * z, cross_entropy.detach(), z.detach())


def scale_and_softcap(logits: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """`softcap(multiplier * logits)`, a new tensor where it is another one."""
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum. Not a product with the weights alone: 0 times a padding token's infinity is not a number."""
    return torch.where(weights > 0, values * weights, 0.0).sum()


def cross_entropy_ref(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and log-sum-exp of each row of logits.

    With `gradient` the logits are overwritten by that of the sum of `weights * (cross_entropy + z_loss * lse^2)`.
    """
    z = scale_and_softcap(logits.to(wide(logits.dtype)), multiplier, softcap)
    lse = z.logsumexp(-1)
    each = lse - (1 - smoothing) * z.gather(-1, targets[:, None])[:, 0]
    if smoothing:
        each = each - smoothing * z.mean(-1)
    if gradient:
        slope = None if softcap is None else 1 - (z / softcap) ** 2
        z.sub_(lse[:, None]).exp_().mul_((1 + 2 * z_loss * lse)[:, None])
        if smoothing:
            z.sub_(smoothing / z.shape[-1])
        z.scatter_add_(-1, targets[:, None], z.new_full((), smoothing - 1).expand(len(z), 1))
        if slope is not None:
            z.mul_(slope)
        z.mul_((weights * multiplier)[:, None]).masked_fill_((weights == 0)[:, None], 0.0)
        if z is not logits:
            logits.copy_(z)
    return each, lse


def chunk_size(rows: int, vocabulary: int, on_cpu: bool) -> int:
    """How many rows make a chunk: some hundred megabytes of logits, and enough for products at full rate.

    >>> chunk_size(16384, 32000, False), chunk_size(16384, 128256, False), chunk_size(100, 32000, False)
    (4096, 2048, 100)
    """
    most = max(2**24 // vocabulary, 256) if on_cpu else max(2**27 // vocabulary, 2048)
    even = -(-rows // -(-rows // most)) if rows else 1  # chunks of about the same size
    return min(-(-even // 128) * 128, max(rows, 1))


def logits_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type of the logits: autocast's where it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def kept(weight: Tensor) -> torch.dtype:
    """The type a table's gradient waits in for the backward pass; in float16 sums over many rows would overflow."""
    return weight.dtype if weight.dtype == torch.bfloat16 else wide(weight.dtype)


@custom_op("phasor::linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    rows: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and z, then the loss's gradients by hidden, weight and bias, empty where not wanted."""
    count, vocabulary = len(hidden), len(weight)
    rows = rows or chunk_size(count, vocabulary, hidden.device.type == "cpu")
    judge, gradient = chunk_cross_entropy_for(dtype, hidden), any(wanted)
    made = torch.empty if count else torch.zeros
    sums: dict[str, Any] = {"dtype": wide(dtype), "device": hidden.device}
    each, lse = made(count, **sums), made(count, **sums)
    by_hidden = made(hidden.shape if wanted[0] else 0, dtype=dtype, device=hidden.device)
    by_weight = made(weight.shape if wanted[1] else 0, **sums)
    by_bias = torch.zeros(vocabulary if wanted[2] else 0, **sums)
    with torch.autocast(hidden.device.type, enabled=False):
        h, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        held = torch.empty(min(rows, count), vocabulary, dtype=dtype, device=hidden.device)
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits = held[: min(rows, count - start)]
            torch.mm(h[part], w.t(), out=logits) if b is None else torch.addmm(b, h[part], w.t(), out=logits)
            each[part], lse[part] = judge(
                logits, targets[part], weights[part], smoothing, z_loss, multiplier, softcap, gradient
            )
            if wanted[0]:
                torch.mm(logits, w, out=by_hidden[part])
            if wanted[1]:
                add_product(by_weight, logits.t(), h[part], first=start == 0)
            if wanted[2]:
                by_bias += logits.sum(0, dtype=by_bias.dtype)
            del logits
        del held  # before the table's gradient is copied into its own type: memory is at its peak here
    cross_entropy, z = weighted_sum(each, weights), weighted_sum(lse**2, weights) if z_loss else each.new_zeros(())
    return cross_entropy + z_loss * z, cross_entropy, z, by_hidden, by_weight.to(kept(weight)), by_bias


@_linear_cross_entropy.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    dtype, wanted = others[-3:-1]
    sums = [hidden.new_empty((), dtype=wide(dtype)) for _ in range(3)]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    types = (dtype, kept(weight), wide(dtype))
    return (
        *sums,
        *(hidden.new_empty(s if w else (0,), dtype=t) for s, t, w in zip(shapes, types, wanted, strict=True)),
    )


def chunk_cross_entropy_for(dtype: torch.dtype, *tensors: Tensor) -> Judge:
    if kernel_why_not(dtype, *tensors) is not None:
        return cross_entropy_ref
    from phasor.ops.cross_entropy.kernels import judge

    return judge


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total += a b`, or `total = a b` at first. A GPU's product of 16-bit numbers adds up in float32 all the way."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.types = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.wanted = inputs[-2]
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_back(ctx: Any, by: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    of = zip(ctx.saved_tensors, ctx.types, ctx.wanted, strict=True)
    scaled = (None if by is None or not wanted else _scaled(gradient, by, dtype) for gradient, dtype, wanted in of)
    return (*scaled, *(None,) * 9)


_linear_cross_entropy.register_autograd(_scale_back, setup_context=_keep)


@custom_op("phasor::scale")
def _scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` times one number in float32, in one pass whatever the types; a number without axes would be rounded first."""
    return torch.mul(x, by.view((1,) * x.dim()), out=torch.empty_like(x, dtype=dtype))


@_scaled.register_fake
def _(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
