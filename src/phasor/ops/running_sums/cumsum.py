"""Running sums over tokens: on a GPU by a kernel whose programs read the columns of many tokens side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import triton_why_not


def cumsum_tokens(x: Tensor) -> Tensor:
    """Running sums over the tokens of `[B, T, ...]`.

    >>> cumsum_tokens(torch.tensor([[1, 2, 3]])).tolist()
    [[1, 3, 6]]
    """
    if x.shape[1] == 1:
        return x
    if x.dtype == torch.int64 or (x.dtype == torch.float32 and triton_why_not(x) is None):
        sums: Tensor = cumsum_op(x, False)
        return sums
    return x.cumsum(1)


@custom_op("phasor::cumsum_tokens")
def cumsum_op(x: Tensor, reverse: bool) -> Tensor:
    """Running sums, or with `reverse` those from the last token: an operation as some compilers fail on integers'."""
    if triton_why_not(x) is not None:
        return x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    from phasor.ops.running_sums.kernels import launch_cumsum

    out = empty_sums(x)
    launch_cumsum(x, out, reverse=reverse)
    return out


def empty_sums(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.reverse = inputs.reverse


def backward(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    """What a token adds to is in the sums of all later ones."""
    return {"x": cumsum_op(grad, not ctx.reverse)}


cumsum_op.register_fake(empty_sums)
cumsum_op.register_autograd(backward, setup_context=setup_context)
