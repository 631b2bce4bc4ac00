"""Attention over tensors of more than 2^31 elements, split so that fused kernels can compute its gradient.

In the backward pass cuDNN's kernels and torch's flash kernels index with int32. Past 2^31 elements the gradients are
silently wrong; the forward pass is right. A part is contiguous in memory, and so is its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 31
TILE_TOKENS, MIN_FEATURES = 128, 32  # kernels index whole tiles of tokens, and at least this many features


def has_int32_kernels(q: Tensor) -> bool:
    """Whether kernels that index with int32 may run on these queries: on a GPU."""
    return q.is_cuda


def exceeds_int32(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether queries `[B, Tq, H, D]` over `[B, Tk, K, D]` are too large for their gradients to be computed at once.

    >>> q, k, v = torch.zeros(3, 1, 1, 1, 1).expand(3, 1, 1 << 20, 32, 128)
    >>> exceeds_int32(q, k, v), exceeds_int32(q[:, :9], k, v), exceeds_int32(q[:, :9], k[:, :9], v[:, :9])
    (True, True, False)
    """
    tiles = -(-max(q.shape[1], k.shape[1]) // TILE_TOKENS)
    return q.shape[0] * q.shape[2] * tiles * TILE_TOKENS * max(q.shape[3], v.shape[3], MIN_FEATURES) > MAX_ELEMENTS


def make_dense(x: Tensor) -> Tensor:
    """A contiguous copy where the strides span more than int32 can index, as in slices of a fused projection."""
    strides = x.stride()
    span = 1 + sum(map(operator.mul, x.shape, strides)) - sum(strides)
    return x.contiguous() if span > MAX_ELEMENTS else x


def attend_in_halves(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> Tensor:
    """`attend(q, k, v, *masks)` for half of the rows at a time or, of a single row, half of the heads.

    `masks` are masks and biases `[B or 1, H or 1, ...]`.
    """
    rows, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    if rows == heads == 1:
        tokens, features = max(q.shape[1], k.shape[1]), max(q.shape[3], v.shape[3])
        raise ValueError(
            f"a head of {tokens:,} tokens with {features} features counts as more than 2^31 elements, too many for "
            "gradients of attention to all of them: give the layer a window, or fewer tokens"
        )
    if rows > 1:
        dim, query_split, key_split = 0, rows // 2, rows // 2
    else:
        dim, key_split = 2, kv_heads // 2
        query_split = key_split * (heads // kv_heads) if kv_heads > 1 else heads // 2
    qkv_halves = [split(q, dim, query_split), split(k, dim, key_split), split(v, dim, key_split)]
    mask_halves = [(None, None) if x is None else split(x, dim // 2, query_split) for x in masks]
    halves = [
        _ContiguousGradient.apply(attend(*(x[i].contiguous() for x in qkv_halves), *(x[i] for x in mask_halves)))
        for i in range(2)
    ]
    return torch.cat(halves, dim=dim)


def split(x: Tensor, dim: int, index: int) -> tuple[Tensor, ...]:
    """The two parts of a tensor; one that is broadcast along the dimension serves both."""
    return (x, x) if x.shape[dim] == 1 else x.tensor_split([index], dim=dim)


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient is made contiguous."""

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
