"""Triton kernels for products of low rank, each bound by the one matrix that is large: it is read once.

The rank is padded to a power of two, of at least 16, for the tensor cores. Sums are in float32, in an order that does
not change.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2

MIN_RANK = 16  # of a product by tensor cores
UPDATE_TILE = {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 8}
ADD_TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8}
# By padded rank, as shared memory of 227 KB holds them: wide tiles leave few parts of `dy B` to be summed.
GRADIENT_TILES = {
    16: {"BLOCK_M": 64, "BLOCK_N": 512, "NUM_STAGES": 3, "num_warps": 8},
    32: {"BLOCK_M": 64, "BLOCK_N": 512, "NUM_STAGES": 2, "num_warps": 8},
    64: {"BLOCK_M": 64, "BLOCK_N": 256, "NUM_STAGES": 3, "num_warps": 8},
}
MAX_WAVES = 4  # of programs, one after another
PARTS_TILE = 8192  # elements that a program sums


@triton.jit
def add_product_kernel(
    y_ptr, low_ptr, factor_ptr, M, N, stride_y, RANK: tl.constexpr, TRANSPOSED: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`y [M, N] += low [M, RANK] factor [RANK, N]` for a tile of y, rounded once; TRANSPOSED: by `factor [N, RANK]`."""
    tiles = tl.cdiv(N, BLOCK_N)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ranks = tl.arange(0, PADDED)
    ptrs = y_ptr + offs_m * stride_y + offs_n
    y = tl.load(ptrs, mask=(offs_m < M) & (offs_n < N), other=0.0)
    low = tl.load(low_ptr + offs_m * RANK + ranks[None, :], mask=(offs_m < M) & (ranks[None, :] < RANK), other=0.0)
    if TRANSPOSED:
        factor_ptrs = factor_ptr + offs_n * RANK + ranks[:, None]
    else:
        factor_ptrs = factor_ptr + ranks[:, None] * N + offs_n
    factor = tl.load(factor_ptrs, mask=(ranks[:, None] < RANK) & (offs_n < N), other=0.0)
    total = y.to(tl.float32) + tl.dot(low, factor)
    tl.store(ptrs, total.to(y_ptr.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


@triton.jit
def product_tile(
    b_ptr, a_ptr, first_n, first_k, N, K,
    RANK: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the product of `b [N, RANK]` and `a [RANK, K]`, in float32."""
    offs_n, ranks = (first_n + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, PADDED)
    offs_k = (first_k + tl.arange(0, BLOCK_K))[None, :]
    b = tl.load(b_ptr + offs_n * RANK + ranks[None, :], mask=(offs_n < N) & (ranks[None, :] < RANK), other=0.0)
    a = tl.load(a_ptr + ranks[:, None] * K + offs_k, mask=(ranks[:, None] < RANK) & (offs_k < K), other=0.0)
    return tl.dot(b, a)


@triton.jit
def int8_updated_kernel(
    y_ptr, a_ptr, b_ptr, values_ptr, scale_ptr, N, K,
    RANK: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of `y [N, K] = scale [N, 1] values [N, K] + b [N, RANK] a [RANK, K]`, rounded once."""
    tiles = tl.cdiv(K, BLOCK_K)
    first_n, first_k = tl.program_id(0) // tiles * BLOCK_N, tl.program_id(0) % tiles * BLOCK_K
    update = product_tile(b_ptr, a_ptr, first_n, first_k, N, K, RANK, PADDED, BLOCK_N, BLOCK_K)
    offs_n, offs_k = (first_n + tl.arange(0, BLOCK_N))[:, None], (first_k + tl.arange(0, BLOCK_K))[None, :]
    offs, inside = offs_n.to(tl.int64) * K + offs_k, (offs_n < N) & (offs_k < K)
    values = tl.load(values_ptr + offs, mask=inside, other=0).to(tl.float32)
    y = values * tl.load(scale_ptr + offs_n, mask=offs_n < N, other=0.0) + update
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradients_kernel(
    dlow_ptr, db_ptr, dy_ptr, low_ptr, b_ptr, M, N, stride_dy, rows,
    RANK: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_N columns of `dy [M, N]` and a group of rows, the parts of `dy B` and `dy^T low`, in float32.

    `dlow [column groups, M, RANK]` has the products of every row with these columns of `B [N, RANK]`, and
    `db [row groups, N, RANK]` the sums over these rows with `low [M, RANK]`.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, PADDED)[None, :]
    inside = (offs_n[:, None] < N) & (ranks < RANK)
    b = tl.load(b_ptr + offs_n[:, None] * RANK + ranks, mask=inside, other=0.0)
    dlow_ptr += tl.program_id(0).to(tl.int64) * M * RANK
    db_ptr += tl.program_id(1).to(tl.int64) * N * RANK
    db = tl.zeros([BLOCK_N, PADDED], tl.float32)
    begin = tl.program_id(1) * rows
    for start in tl.range(begin, tl.minimum(begin + rows, M), BLOCK_M, num_stages=NUM_STAGES):
        offs_m = (start + tl.arange(0, BLOCK_M))[:, None]
        dy_ptrs = dy_ptr + offs_m.to(tl.int64) * stride_dy + offs_n[None, :]
        dy = tl.load(dy_ptrs, mask=(offs_m < M) & (offs_n[None, :] < N), other=0.0)
        mask = (offs_m < M) & (ranks < RANK)
        low = tl.load(low_ptr + offs_m * RANK + ranks, mask=mask, other=0.0)
        tl.store(dlow_ptr + offs_m * RANK + ranks, tl.dot(dy, b), mask=mask)
        db = tl.dot(tl.trans(dy), low, db)
    tl.store(db_ptr + offs_n[:, None] * RANK + ranks, db, mask=inside)


@triton.jit
def sum_parts_kernel(y_ptr, parts_ptr, count, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """`y [size]`, the sums of `parts [count, size]`, rounded once."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)[:, None]
    ptrs = parts_ptr + part.to(tl.int64) * size + offs[None, :]
    parts = tl.load(ptrs, mask=(part < count) & (offs[None, :] < size), other=0.0)
    tl.store(y_ptr + offs, tl.sum(parts, axis=0).to(y_ptr.dtype.element_ty), mask=offs < size)


def padded_rank(rank: int) -> int:
    """The rank that tiles have.

    >>> padded_rank(8), padded_rank(24)
    (16, 32)
    """
    return max(MIN_RANK, next_power_of_2(rank))


def prepare_add(M: int, N: int, stride_y: int, RANK: int, TRANSPOSED: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the tiles."""
    return (cdiv(M, ADD_TILE["BLOCK_M"]) * cdiv(N, ADD_TILE["BLOCK_N"]),), {"PADDED": padded_rank(RANK), **ADD_TILE}


def prepare_update(N: int, K: int, RANK: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the tiles."""
    grid = (cdiv(N, UPDATE_TILE["BLOCK_N"]) * cdiv(K, UPDATE_TILE["BLOCK_K"]),)
    return grid, {"PADDED": padded_rank(RANK), **UPDATE_TILE}


def prepare_gradients(M: int, N: int, stride_dy: int, rows: int, RANK: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid, groups of columns by groups of rows, and the tiles."""
    padded = padded_rank(RANK)
    tiles = GRADIENT_TILES[padded]
    return (cdiv(N, tiles["BLOCK_N"]), cdiv(M, rows)), {"PADDED": padded, **tiles}


def prepare_sums(count: int, size: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the tiles."""
    parts = next_power_of_2(count)
    block = max(PARTS_TILE // parts, 16)
    return (cdiv(size, block),), {"PARTS": parts, "BLOCK": block, "num_warps": 4}


ADD = KernelLauncher(add_product_kernel, prepare_add)
INT8_UPDATED = KernelLauncher(int8_updated_kernel, prepare_update)
GRADIENTS = KernelLauncher(gradients_kernel, prepare_gradients)
SUMS = KernelLauncher(sum_parts_kernel, prepare_sums)


def add_product(y: Tensor, low: Tensor, factor: Tensor) -> Tensor:
    """`y += low factor` for `y [M, N]` with dense rows, `low [M, rank]`, `factor [rank, N]`."""
    if y.numel():
        transposed = not factor.is_contiguous()
        factor = (factor.t() if transposed else factor).contiguous()
        tensors = {"y_ptr": y, "low_ptr": low.contiguous(), "factor_ptr": factor}
        (M, N), rank = y.shape, low.shape[1]
        ADD(y, tensors, M=M, N=N, stride_y=y.stride(0), RANK=rank, TRANSPOSED=transposed)
    return y


def int8_with_update(values: Tensor, scale: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """`scale values + B A` for `values [N, K]` in int8, `scale [N]`, `A [rank, K]` and `B [N, rank]`."""
    y = torch.empty(values.shape, dtype=A.dtype, device=A.device)
    factors = {"a_ptr": A.contiguous(), "b_ptr": B.contiguous()}
    tensors = {"y_ptr": y, **factors, "values_ptr": values.contiguous(), "scale_ptr": scale.contiguous()}
    INT8_UPDATED(y, tensors, N=len(B), K=A.shape[1], RANK=len(A))
    return y


def rows_of_a_group(rows: int, columns: int, block: int, processors: int) -> int:
    """The rows that a program goes through, of which there are some for each of the groups of columns.

    Of the numbers of programs that take one to four waves, it is that which leaves the fewest processors idle.

    >>> rows_of_a_group(16384, 56, 64, 132)  # 7 groups: 392 programs, almost three for each processor
    2368
    """

    def busy(size: int) -> float:
        programs = columns * cdiv(rows, size)
        return programs / (cdiv(programs, processors) * processors)

    groups = (max(1, wave * processors // columns) for wave in range(1, MAX_WAVES + 1))
    return max((cdiv(cdiv(rows, count), block) * block for count in groups), key=busy)


def gradients(dy: Tensor, low: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """`dy B` and `dy^T low` for `dy [M, N]` with dense rows, `low [M, rank]`, `B [N, rank]`."""
    (M, N), rank = dy.shape, B.shape[1]
    tiles = GRADIENT_TILES[padded_rank(rank)]
    columns = cdiv(N, tiles["BLOCK_N"])
    processors = torch.cuda.get_device_properties(dy.device).multi_processor_count if dy.is_cuda else 3
    rows = rows_of_a_group(M, columns, tiles["BLOCK_M"], processors)
    dlow = torch.empty(columns, M, rank, dtype=torch.float32, device=dy.device)
    dB = torch.empty(cdiv(M, rows), N, rank, dtype=torch.float32, device=dy.device)
    tensors = {"dlow_ptr": dlow, "db_ptr": dB, "dy_ptr": dy, "low_ptr": low.contiguous(), "b_ptr": B.contiguous()}
    GRADIENTS(dy, tensors, M=M, N=N, stride_dy=dy.stride(0), rows=rows, RANK=rank)
    return sum_parts(dlow, dy.dtype), sum_parts(dB, dy.dtype)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of `parts [count, ...]` in another dtype."""
    y = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    SUMS(y, {"y_ptr": y, "parts_ptr": parts}, count=len(parts), size=y.numel())
    return y
