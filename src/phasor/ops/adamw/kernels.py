"""A step of AdamW on a GPU: one launch for all tensors of a type, every number read once and written once.

A program updates one block of one tensor. Which one is found in tables on the device: for every block its tensor, and
for every tensor where it, its averages and its count of steps lie. Gradients lie elsewhere at each step, so their
addresses go along with a launch, as arguments that a CUDA graph keeps.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import on_device

BLOCK, PIECE, WARPS = 4096, 1024, 4  # weights of a program, weights it holds at a time
COLUMNS = tl.constexpr(6)  # of the table: addresses of weights, averages and step, the size, and the first block
FACTORS = tl.constexpr(8)  # numbers that all weights of a tensor share: see `_prepare`
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Shared(NamedTuple):
    """What the tensors of a group have in common, and how many they are."""

    tensors: int
    rate: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float


@triton.jit
def _prepare(
    table, factors, scale, wrong, rate, log_beta1, log_beta2, rest1, rest2, eps, decay, RATE_IS_THERE: tl.constexpr
):  # fmt: skip
    """Count the step of one tensor, and note what its weights share; `rest` is 1 - beta."""
    row = tl.program_id(0)
    counted = tl.load(table + row * COLUMNS + 3).to(tl.pointer_type(tl.float32))
    step = tl.load(counted) + 1.0
    if wrong is not None:
        step -= tl.load(wrong)
    tl.store(counted, step)
    if RATE_IS_THERE:  # and not passed by value
        rate = tl.load(rate).to(tl.float32)
    times = 1.0
    if scale is not None:
        times = tl.load(scale).to(tl.float32)
    bias1 = 1.0 - tl.exp(step.to(tl.float64) * log_beta1)
    bias2 = 1.0 - tl.exp(step.to(tl.float64) * log_beta2)
    factors += row * FACTORS
    tl.store(factors, times)
    tl.store(factors + 1, rest1)
    tl.store(factors + 2, rest2)
    tl.store(factors + 3, (1.0 / tl.sqrt(bias2)).to(tl.float32))
    tl.store(factors + 4, eps)
    tl.store(factors + 5, (rate / bias1).to(tl.float32))
    tl.store(factors + 6, rate * decay)
    tl.store(factors + 7, step)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """To numbers from an address on, which is a multiple of 16."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _drawn(seed, step, block, piece, PIECE: tl.constexpr):
    """16 random bits for every weight of a piece: eight from each draw of Philox, which never repeats a count."""
    at = piece // 8 + tl.arange(0, PIECE // 8)
    a, b, c, d = tl.philox(seed, at, at * 0 + block, at * 0 + step, at * 0)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (PIECE,))


@triton.jit
def _dithered(x, bits):
    """Float32 to one of the two neighbors in bfloat16, to the nearer one more often: the mean is kept."""
    above = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, above.to(tl.float32, bitcast=True), x)  # what is not a number would overflow


@triton.jit
def _update(weights, grads, means, squares, factors, bits, at, mask):
    """Some weights of a tensor, in float32."""
    scale, rest1, rest2, unbias, eps, rate, decay = factors
    grad = tl.load(grads + at, mask=mask).to(tl.float32) * scale
    mean = tl.load(means + at, mask=mask).to(tl.float32)
    square = tl.load(squares + at, mask=mask).to(tl.float32)
    weight = tl.load(weights + at, mask=mask).to(tl.float32)
    mean += rest1 * (grad - mean)
    square += rest2 * (grad * grad - square)
    weight -= decay * weight
    weight -= rate * mean / (tl.sqrt(square) * unbias + eps)
    if bits is not None:
        weight = _dithered(weight, bits)
    tl.store(means + at, mean.to(means.dtype.element_ty), mask=mask)
    tl.store(squares + at, square.to(squares.dtype.element_ty), mask=mask)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["seed"])
def _step(
    owners, table, addresses, factors, wrong, seed,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, DITHER: tl.constexpr,
):  # fmt: skip
    """Update one block, piece by piece, unless something is wrong."""
    block = tl.program_id(0)
    row = tl.load(owners + block)
    fine = True
    if wrong is not None:
        fine = tl.load(wrong) != 1.0
    if fine:
        table += row * COLUMNS
        factors += row * FACTORS
        grads = _pointer(addresses + row, DTYPE)
        weights, means, squares = _pointer(table, DTYPE), _pointer(table + 1, DTYPE), _pointer(table + 2, DTYPE)
        shared = (
            tl.load(factors), tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3),
            tl.load(factors + 4), tl.load(factors + 5), tl.load(factors + 6),
        )  # fmt: skip
        start = (block - tl.load(table + 5)) * BLOCK
        left = tl.minimum(tl.load(table + 4) - start, BLOCK).to(tl.int32)
        weights, grads, means, squares = weights + start, grads + start, means + start, squares + start
        step = tl.load(factors + 7).to(tl.int32)
        if left == BLOCK:
            for piece in range(0, BLOCK, PIECE):
                bits = _drawn(seed, step, block, piece, PIECE) if DITHER else None
                _update(weights, grads, means, squares, shared, bits, piece + tl.arange(0, PIECE), None)
        else:
            for piece in range(0, left, PIECE):
                bits = _drawn(seed, step, block, piece, PIECE) if DITHER else None
                at = piece + tl.arange(0, PIECE)
                _update(weights, grads, means, squares, shared, bits, at, at < left)


class Plan:
    """The tables of a step over these tensors, made once: as long as the tensors lie where they do.

    It is made outside of CUDA graphs, and must be kept as long as one that was captured with it.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        block: int = BLOCK,
    ) -> None:
        device, self.block, self.dtype = weights[0].device, block, TYPES[weights[0].dtype]
        counts = [-(-weight.numel() // block) for weight in weights]
        firsts = itertools.accumulate(counts, initial=0)
        tensors = zip(weights, means, squares, steps, firsts, strict=False)
        rows = [[*(x.data_ptr() for x in (w, m, v, s)), w.numel(), first] for w, m, v, s, first in tensors]
        self.table = torch.tensor(rows, device=device)
        owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
        self.owners = owners.to(device)

    def step(
        self,
        gradients: Sequence[Tensor],
        groups: Sequence[Shared],
        scale: Tensor | None,
        wrong: Tensor | None,
        seed: int | None = None,
        piece: int = PIECE,
        warps: int = WARPS,
    ) -> None:
        """Update all weights by their gradients times `scale`, unless `wrong` is 1.

        Weights are rounded to the nearest number; with a `seed`, which bfloat16 alone takes, up or down at random.
        """
        addresses = torch.zeros(len(gradients), dtype=torch.int64, device=self.table.device)
        factors = torch.empty(len(gradients), FACTORS.value, device=self.table.device)
        with on_device(self.table):
            torch._foreach_add_(addresses.unbind(), [gradient.data_ptr() for gradient in gradients])
            first = 0
            for group in groups:
                _prepare[(group.tensors,)](
                    self.table[first:], factors[first:], scale, wrong, group.rate,
                    log(group.beta1), log(group.beta2), 1 - group.beta1, 1 - group.beta2, group.eps, group.decay,
                    RATE_IS_THERE=isinstance(group.rate, Tensor), num_warps=1,
                )  # fmt: skip
                first += group.tensors
            if len(self.owners):
                _step[(len(self.owners),)](
                    self.owners, self.table, addresses, factors, wrong, seed or 0, DTYPE=self.dtype,
                    BLOCK=self.block, PIECE=min(piece, self.block), DITHER=seed is not None, num_warps=warps,
                )  # fmt: skip


def log(beta: float) -> float:
    """The logarithm, of 0 too, so that its multiples are those of a small number and its powers are 0."""
    return math.log(beta) if beta > 0 else -1e30
