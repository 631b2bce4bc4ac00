"""Attention over more numbers than the backward pass of a fused kernel can count: in parts.

On the way back cuDNN's kernels and torch's flash kernels find their places by numbers of 32 bits. Past 2^31 of them the
gradients are wrong, and nothing says so; forward they are right. A part has its numbers side by side in memory, and so
has its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 1 << 31
TOKENS, FEATURES = 128, 32  # kernels count tokens by tiles of so many, and no fewer features


def matters(q: Tensor) -> bool:
    """Whether such kernels are there for these queries: on a GPU."""
    return q.is_cuda


def exceeds(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether queries `[B, Tq, H, D]` over `[B, Tk, K, D]` are too many for the gradients to be taken at once.

    >>> q, k, v = torch.zeros(3, 1, 1, 1, 1).expand(3, 1, 1 << 20, 32, 128)
    >>> exceeds(q, k, v), exceeds(q[:, :9], k, v), exceeds(q[:, :9], k[:, :9], v[:, :9])
    (True, True, False)
    """
    tiles = -(-max(q.shape[1], k.shape[1]) // TOKENS)
    return q.shape[0] * q.shape[2] * tiles * TOKENS * max(q.shape[3], v.shape[3], FEATURES) > MOST


def dense(x: Tensor) -> Tensor:
    """The same side by side, where it lies scattered over more than can be counted, as parts of a projection do."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if span > MOST else x


def in_halves(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *about: Tensor | None) -> Tensor:
    """`attend(q, k, v, *about)` by half of the rows at a time or, of a single one, of its heads.

    `about` are masks and biases `[B or 1, H or 1, ...]`.
    """
    rows, heads, groups = q.shape[0], q.shape[2], k.shape[2]
    if rows == heads == 1:
        tokens, features = max(q.shape[1], k.shape[1]), max(q.shape[3], v.shape[3])
        raise ValueError(
            f"a head of {tokens:,} tokens with {features} features counts as more than 2^31 numbers, too many for "
            "gradients of attention to all of them: give the layer a window, or fewer tokens"
        )
    if rows > 1:
        axis, queries, keys = 0, rows // 2, rows // 2
    else:
        axis, keys = 2, groups // 2
        queries = keys * (heads // groups) if groups > 1 else heads // 2
    parts = [split(q, axis, queries), split(k, axis, keys), split(v, axis, keys)]
    masks = [(None, None) if x is None else split(x, axis // 2, queries) for x in about]
    halves = [
        _DenseGradient.apply(attend(*(x[half].contiguous() for x in parts), *(x[half] for x in masks)))
        for half in range(2)
    ]
    return torch.cat(halves, dim=axis)


def split(x: Tensor, axis: int, at: int) -> tuple[Tensor, ...]:
    """The two parts of a tensor; what is the same for all along the axis is the same for both."""
    return (x, x) if x.shape[axis] == 1 else x.tensor_split([at], dim=axis)


class _DenseGradient(torch.autograd.Function):
    """The same, whose gradient goes on with its numbers side by side in memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
