"""Triton kernels for gated activations and their products of low rank: gate and up are read once, sums are in float32.

The order of sums does not change. For the gradient of the product's factor the activation is computed again and not
written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.glu.kernels import activation_and_slope
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense, supports_ptx
from phasor.ops.low_rank_kernels import padded_rank, rows_of_a_group, sum_parts

TILE = {"BLOCK_M": 32, "BLOCK_D": 128, "NUM_STAGES": 3, "num_warps": 4}
GRADIENT_TILE = {"BLOCK_M": 32, "BLOCK_D": 128, "NUM_STAGES": 3, "num_warps": 8}
COLUMN_GROUPS = 4  # of programs, whose parts of a product are summed


@triton.jit
def computed_once(x, USE_ASM: tl.constexpr):
    """Elements of 16 bits as they are: with USE_ASM the compiler does not compute them again for each of their uses."""
    if USE_ASM:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def glu_product_kernel(
    h_ptr, low_ptr, x_ptr, a_ptr, M, D, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, ACTIVATION: tl.constexpr, USE_ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_M rows and a group of columns `h [M, D] = act(gate) * up`, and their part of `h a^T`, `[M, RANK]`."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    ranks = tl.arange(0, PADDED)[None, :]
    low = tl.zeros([BLOCK_M, PADDED], tl.float32)
    begin = tl.program_id(1) * columns
    for start in tl.range(begin, tl.minimum(begin + columns, D), BLOCK_D, num_stages=NUM_STAGES):
        offs_d = start + tl.arange(0, BLOCK_D)
        inside = (offs_m < M) & (offs_d[None, :] < D)
        x_ptrs = x_ptr + offs_m * (2 * D) + offs_d[None, :]
        gate = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptrs + D, mask=inside, other=0.0).to(tl.float32)
        value, _ = activation_and_slope(gate, ACTIVATION)
        h = computed_once((value * up).to(h_ptr.dtype.element_ty), USE_ASM)
        tl.store(h_ptr + offs_m * D + offs_d[None, :], h, mask=inside)
        a = tl.load(a_ptr + ranks * D + offs_d[:, None], mask=(ranks < RANK) & (offs_d[:, None] < D), other=0.0)
        low = tl.dot(h, a, low)
    low_ptr += tl.program_id(1).to(tl.int64) * M * RANK
    tl.store(low_ptr + offs_m * RANK + ranks, low, mask=(offs_m < M) & (ranks < RANK))


@triton.jit
def glu_gradients_kernel(
    dx_ptr, da_ptr, dh_ptr, x_ptr, dlow_ptr, M, D, rows,
    RANK: tl.constexpr, PADDED: tl.constexpr, ACTIVATION: tl.constexpr, USE_ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_D columns and a group of rows `dx [M, 2 D]`, the gradients of gate and up for that of `h [M, D]`.

    `da [row groups, RANK, D]` has the sums of `dlow^T h` over these rows.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ranks = tl.arange(0, PADDED)[None, :]
    da = tl.zeros([BLOCK_D, PADDED], tl.float32)
    begin = tl.program_id(1) * rows
    for start in tl.range(begin, tl.minimum(begin + rows, M), BLOCK_M, num_stages=NUM_STAGES):
        offs_m = (start + tl.arange(0, BLOCK_M))[:, None]
        inside = (offs_m < M) & (offs_d[None, :] < D)
        places = offs_m.to(tl.int64) * D + offs_d[None, :]
        pairs = places + offs_m.to(tl.int64) * D
        dh = tl.load(dh_ptr + places, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x_ptr + pairs, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + pairs + D, mask=inside, other=0.0).to(tl.float32)
        value, slope = activation_and_slope(gate, ACTIVATION)
        tl.store(dx_ptr + pairs, (dh * up * slope).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + pairs + D, (dh * value).to(dx_ptr.dtype.element_ty), mask=inside)
        h = computed_once((value * up).to(dx_ptr.dtype.element_ty), USE_ASM)
        dlow = tl.load(dlow_ptr + offs_m * RANK + ranks, mask=(offs_m < M) & (ranks < RANK), other=0.0)
        da = tl.dot(tl.trans(h), dlow, da)
    da_ptr += tl.program_id(1).to(tl.int64) * D * RANK
    tl.store(da_ptr + ranks * D + offs_d[:, None], da, mask=(offs_d[:, None] < D) & (ranks < RANK))


def prepare(
    M: int, D: int, columns: int, RANK: int, ACTIVATION: str, USE_ASM: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid, blocks of rows by groups of columns, and the tiles."""
    return (cdiv(M, TILE["BLOCK_M"]), cdiv(D, columns)), {"PADDED": padded_rank(RANK), **TILE}


def prepare_gradients(
    M: int, D: int, rows: int, RANK: int, ACTIVATION: str, USE_ASM: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid, blocks of columns by groups of rows, and the tiles."""
    return (cdiv(D, GRADIENT_TILE["BLOCK_D"]), cdiv(M, rows)), {"PADDED": padded_rank(RANK), **GRADIENT_TILE}


PRODUCT = KernelLauncher(glu_product_kernel, prepare)
GRADIENTS = KernelLauncher(glu_gradients_kernel, prepare_gradients)


def glu_product(x: Tensor, A: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`h = act(gate) * up` and `h A^T` for `x [M, 2 D]`, gate and up, and `A [rank, D]`."""
    (rank, D), M = A.shape, len(x)
    columns = cdiv(cdiv(D, COLUMN_GROUPS), TILE["BLOCK_D"]) * TILE["BLOCK_D"]
    h = x.new_empty(M, D)
    low = torch.empty(cdiv(D, columns), M, rank, dtype=torch.float32, device=x.device)
    tensors = {"h_ptr": h, "low_ptr": low, "x_ptr": x.contiguous(), "a_ptr": A.contiguous()}
    PRODUCT(x, tensors, M=M, D=D, columns=columns, RANK=rank, ACTIVATION=activation, USE_ASM=supports_ptx(x.device))
    return h, sum_parts(low, x.dtype)


def glu_product_backward(dh: Tensor, x: Tensor, dlow: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """For `x [M, 2 D]`, whose activation h has the gradient `dh [M, D]`, its gradient, and `dlow^T h`."""
    (M, D), rank = dh.shape, dlow.shape[1]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    rows = rows_of_a_group(M, cdiv(D, GRADIENT_TILE["BLOCK_D"]), GRADIENT_TILE["BLOCK_M"], processors)
    dx, da = empty_dense(x), torch.empty(cdiv(M, rows), rank, D, dtype=torch.float32, device=x.device)
    tensors = {"dx_ptr": dx, "da_ptr": da, "dh_ptr": dh.contiguous(), "x_ptr": x.contiguous()}
    tensors |= {"dlow_ptr": dlow.contiguous()}
    GRADIENTS(x, tensors, M=M, D=D, rows=rows, RANK=rank, ACTIVATION=activation, USE_ASM=supports_ptx(x.device))
    return dx, sum_parts(da, x.dtype)
