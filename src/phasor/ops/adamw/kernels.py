"""An AdamW step on a GPU: one launch for all tensors of a dtype, every element read once and written once.

A program updates one block of one tensor. Tables on the device say which: for every block its tensor, and for every
tensor the addresses of parameter, averages and step counter. Gradients have other addresses in each step, so theirs go
along with a launch, as arguments that a CUDA graph keeps.
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

BLOCK, BLOCK_TILE, WARPS = 4096, 1024, 4  # elements of a program, and elements it holds at a time
COLUMNS = tl.constexpr(6)  # of the table: addresses of parameter, averages and step; size; first block
FACTORS = tl.constexpr(8)  # scalars that all elements of a tensor share: see `_prepare_step`
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class GroupOptions(NamedTuple):
    """The options of a parameter group, and how many tensors it has."""

    size: int
    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@triton.jit
def _prepare_step(
    table_ptr, factors_ptr, scale_ptr, found_inf_ptr, lr, log_beta1, log_beta2, one_minus_beta1, one_minus_beta2,
    eps, weight_decay, LR_IS_POINTER: tl.constexpr,
):  # fmt: skip
    """Count the step of one tensor, and store the scalars that its elements share."""
    row = tl.program_id(0)
    step_ptr = tl.load(table_ptr + row * COLUMNS + 3).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr) + 1.0
    if found_inf_ptr is not None:
        step -= tl.load(found_inf_ptr)
    tl.store(step_ptr, step)
    if LR_IS_POINTER:
        lr = tl.load(lr).to(tl.float32)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    bias_correction1 = 1.0 - tl.exp(step.to(tl.float64) * log_beta1)
    bias_correction2 = 1.0 - tl.exp(step.to(tl.float64) * log_beta2)
    factors_ptr += row * FACTORS
    tl.store(factors_ptr, scale)
    tl.store(factors_ptr + 1, one_minus_beta1)
    tl.store(factors_ptr + 2, one_minus_beta2)
    tl.store(factors_ptr + 3, (1.0 / tl.sqrt(bias_correction2)).to(tl.float32))
    tl.store(factors_ptr + 4, eps)
    tl.store(factors_ptr + 5, (lr / bias_correction1).to(tl.float32))
    tl.store(factors_ptr + 6, lr * weight_decay)
    tl.store(factors_ptr + 7, step)


@triton.jit
def _load_pointer(address_ptr, DTYPE: tl.constexpr):
    """A pointer to elements, from an address that is a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _random_bits(seed, step, block, start, BLOCK_TILE: tl.constexpr):
    """16 random bits for every element of a tile: eight from each draw of Philox, which never repeats a counter."""
    offsets = start // 8 + tl.arange(0, BLOCK_TILE // 8)
    a, b, c, d = tl.philox(seed, offsets, offsets * 0 + block, offsets * 0 + step, offsets * 0)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_TILE,))


@triton.jit
def _stochastic_round(x, bits):
    """Float32 to one of its two neighbors in bfloat16, to the nearer one more often, which keeps the mean."""
    above = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, above.to(tl.float32, bitcast=True), x)  # NaN would overflow


@triton.jit
def _step_tile(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, factors, bits, offsets, mask):
    """Update some elements of a tensor, in float32."""
    scale, one_minus_beta1, one_minus_beta2, rsqrt_correction2, eps, step_size, decay = factors
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32) * scale
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)
    param = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg += one_minus_beta1 * (grad - exp_avg)
    exp_avg_sq += one_minus_beta2 * (grad * grad - exp_avg_sq)
    param -= decay * param
    param -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * rsqrt_correction2 + eps)
    if bits is not None:
        param = _stochastic_round(param, bits)
    tl.store(exp_avg_ptr + offsets, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    block_tensor_ptr, table_ptr, grad_addresses_ptr, factors_ptr, found_inf_ptr, seed,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update one block, tile by tile, unless `found_inf` is 1."""
    block = tl.program_id(0)
    row = tl.load(block_tensor_ptr + block)
    finite = True
    if found_inf_ptr is not None:
        finite = tl.load(found_inf_ptr) != 1.0
    if finite:
        table_ptr += row * COLUMNS
        factors_ptr += row * FACTORS
        grad_ptr = _load_pointer(grad_addresses_ptr + row, DTYPE)
        param_ptr = _load_pointer(table_ptr, DTYPE)
        exp_avg_ptr = _load_pointer(table_ptr + 1, DTYPE)
        exp_avg_sq_ptr = _load_pointer(table_ptr + 2, DTYPE)
        factors = (
            tl.load(factors_ptr), tl.load(factors_ptr + 1), tl.load(factors_ptr + 2), tl.load(factors_ptr + 3),
            tl.load(factors_ptr + 4), tl.load(factors_ptr + 5), tl.load(factors_ptr + 6),
        )  # fmt: skip
        start = (block - tl.load(table_ptr + 5)) * BLOCK
        left = tl.minimum(tl.load(table_ptr + 4) - start, BLOCK).to(tl.int32)
        param_ptr, grad_ptr = param_ptr + start, grad_ptr + start
        exp_avg_ptr, exp_avg_sq_ptr = exp_avg_ptr + start, exp_avg_sq_ptr + start
        step = tl.load(factors_ptr + 7).to(tl.int32)
        if left == BLOCK:
            for first in range(0, BLOCK, BLOCK_TILE):
                bits = _random_bits(seed, step, block, first, BLOCK_TILE) if STOCHASTIC else None
                offsets = first + tl.arange(0, BLOCK_TILE)
                _step_tile(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, factors, bits, offsets, None)
        else:
            for first in range(0, left, BLOCK_TILE):
                bits = _random_bits(seed, step, block, first, BLOCK_TILE) if STOCHASTIC else None
                offsets = first + tl.arange(0, BLOCK_TILE)
                mask = offsets < left
                _step_tile(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, factors, bits, offsets, mask)


class StepTables:
    """The device tables of a step over some tensors, built once and valid while the tensors keep their addresses.

    They are built outside of CUDA graphs, and must be kept as long as a graph that was captured with them.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        block: int = BLOCK,
    ) -> None:
        device, self.block, self.dtype = params[0].device, block, TRITON_DTYPES[params[0].dtype]
        counts = [-(-param.numel() // block) for param in params]
        first_blocks = itertools.accumulate(counts, initial=0)
        tensors = zip(params, exp_avgs, exp_avg_sqs, steps, first_blocks, strict=False)
        rows = [[*(x.data_ptr() for x in (w, m, v, s)), w.numel(), first] for w, m, v, s, first in tensors]
        self.table = torch.tensor(rows, device=device)
        block_tensor = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
        self.block_tensor = block_tensor.to(device)

    def step(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[GroupOptions],
        scale: Tensor | None,
        found_inf: Tensor | None,
        seed: int | None = None,
        tile: int = BLOCK_TILE,
        warps: int = WARPS,
    ) -> None:
        """Update all parameters by their gradients times `scale`, unless `found_inf` is 1.

        Parameters are rounded to nearest; with a `seed`, which only bfloat16 takes, stochastically.
        """
        addresses = torch.zeros(len(grads), dtype=torch.int64, device=self.table.device)
        factors = torch.empty(len(grads), FACTORS.value, device=self.table.device)
        with on_device(self.table):
            torch._foreach_add_(addresses.unbind(), [grad.data_ptr() for grad in grads])
            first = 0
            for group in groups:
                _prepare_step[(group.size,)](
                    self.table[first:], factors[first:], scale, found_inf, group.lr, log(group.beta1),
                    log(group.beta2), 1 - group.beta1, 1 - group.beta2, group.eps, group.weight_decay,
                    LR_IS_POINTER=isinstance(group.lr, Tensor), num_warps=1,
                )  # fmt: skip
                first += group.size
            if len(self.block_tensor):
                _adamw_kernel[(len(self.block_tensor),)](
                    self.block_tensor, self.table, addresses, factors, found_inf, seed or 0, DTYPE=self.dtype,
                    BLOCK=self.block, BLOCK_TILE=min(tile, self.block), STOCHASTIC=seed is not None, num_warps=warps,
                )  # fmt: skip


def log(beta: float) -> float:
    """The logarithm of beta; for 0 a large negative number, whose multiples have an exponential of 0."""
    return math.log(beta) if beta > 0 else -1e30
