"""Triton kernels for NF4: dequantization, with or without an update of low rank, and the product of a few rows with a
matrix that is read in 4 bits.

The block scales are dequantized where they are used. The 16 values and the dynamic map are small enough to stay in L1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv
from phasor.ops.low_rank_kernels import prepare_update, product_tile
from phasor.ops.quantized.nf4 import BLOCK_SIZE, NESTED_BLOCK_SIZE, NF4Matrix, dynamic_map, nf4_code

SCALE_GROUP = tl.constexpr(BLOCK_SIZE)
SCALE_WORDS = tl.constexpr(BLOCK_SIZE // 8)
NESTED = tl.constexpr(NESTED_BLOCK_SIZE)
WORDS = 512  # of a program that dequantizes
ROUNDED = {"enable_fp_fusion": False}  # a product is rounded before it is added to, as in bitsandbytes and on a CPU


@triton.jit
def block_scales(absmax_ptr, nested_ptr, offset_ptr, map_ptr, blocks, mask):
    """The largest absolute values of blocks, in float32."""
    place = tl.load(absmax_ptr + blocks, mask=mask, other=0).to(tl.int32)
    nested = tl.load(nested_ptr + blocks // NESTED, mask=mask, other=0.0)
    return tl.load(map_ptr + place) * nested + tl.load(offset_ptr)


@triton.jit
def look_up(w, code_ptr):
    """The values of both halves of bytes, before their scale: two tensors."""
    wide = w.to(tl.int32)
    return tl.load(code_ptr + (wide >> 4)), tl.load(code_ptr + (wide & 15))


@triton.jit
def dequantize_words(
    words_ptr, words, inside, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """The weights `[BLOCK, 8]` of words of int32, eight each, in float32: values are looked up in shared memory."""
    w = tl.load(words_ptr + words, mask=inside, other=0)
    scale = block_scales(absmax_ptr, nested_ptr, offset_ptr, map_ptr, words // SCALE_WORDS, inside)
    nibbles = tl.arange(0, 8)[None, :] ^ 1  # the upper half of a byte comes first
    places = (w[:, None] >> nibbles * 4) & 15
    code = tl.load(code_ptr + tl.arange(0, 16))
    return tl.reshape(tl.gather(code, tl.reshape(places, [BLOCK * 8]), 0), [BLOCK, 8]) * scale[:, None]


@triton.jit
def store_words(y_ptr, words, inside, y):
    """Write weights `[BLOCK, 8]`, in 16 bits those of a word at once."""
    offs_y = words.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def nf4_dequantize_kernel(
    y_ptr, words_ptr, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, num_words, BLOCK: tl.constexpr
):  # fmt: skip
    """`y [8 num_words]` of int32, eight weights each."""
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    y = dequantize_words(words_ptr, words, inside, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, BLOCK)
    store_words(y_ptr, words, inside, y)


@triton.jit
def nf4_updated_kernel(
    y_ptr, a_ptr, b_ptr, words_ptr, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, N, K,
    RANK: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of `y [N, K]`: the weights of words and the product of `b [N, RANK]` and `a [RANK, K]`, rounded once."""
    NUM_WORDS: tl.constexpr = BLOCK_K // 8
    tiles = tl.cdiv(K, BLOCK_K)
    first_n, first_k = tl.program_id(0) // tiles * BLOCK_N, tl.program_id(0) % tiles * BLOCK_K
    update = product_tile(b_ptr, a_ptr, first_n, first_k, N, K, RANK, PADDED, BLOCK_N, BLOCK_K)
    places = tl.arange(0, BLOCK_N * NUM_WORDS)
    rows, columns = first_n + places // NUM_WORDS, first_k // 8 + places % NUM_WORDS
    inside = (rows < N) & (columns < K // 8)
    words = rows * (K // 8) + columns
    y = dequantize_words(
        words_ptr, words, inside, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, BLOCK_N * NUM_WORDS
    )  # fmt: skip
    store_words(y_ptr, words, inside, y + tl.reshape(update, [BLOCK_N * NUM_WORDS, 8]))


@triton.jit
def nf4_gemm_kernel(
    y_ptr, x_ptr, values_ptr, absmax_ptr, nested_ptr, offset_ptr, code_ptr, map_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`y = x W^T` for rows `x [M, K]` that fit into one tile, and BLOCK_N rows of `W [N, K]`; K is a multiple of 64."""
    GROUPS: tl.constexpr = BLOCK_K // SCALE_GROUP
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None].to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + offs_m * K + offs_k, mask=(offs_m < M) & (offs_k < K), other=0.0)
        offs_b = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        inside = (offs_n < N) & (offs_b < K // 2)
        w = tl.load(values_ptr + offs_n * (K // 2) + offs_b, mask=inside, other=0, eviction_policy="evict_first")
        first, second = look_up(w, code_ptr)
        offs_g = start // SCALE_GROUP + tl.arange(0, GROUPS)[None, :]
        mask = (offs_n < N) & (offs_g < K // SCALE_GROUP)
        blocks = offs_n * (K // SCALE_GROUP) + offs_g
        scale = block_scales(absmax_ptr, nested_ptr, offset_ptr, map_ptr, blocks, mask)  # [BLOCK_N, GROUPS]
        tile = tl.reshape(tl.join(first, second), [BLOCK_N, GROUPS, SCALE_GROUP]) * scale[:, :, None]
        tile = tl.reshape(tile, [BLOCK_N, BLOCK_K]).to(x_ptr.dtype.element_ty)
        acc = tl.dot(x, tl.trans(tile), acc, input_precision="ieee")
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y_ptr + offs_m * N + offs_n, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


def tables_of(matrix: NF4Matrix) -> dict[str, Tensor]:
    """The tensors of a matrix and the tables it refers to, as kernels take them."""
    device = matrix.values.device
    values, absmax, nested, offset = (part.contiguous() for part in matrix)
    tensors = {"values_ptr": values, "absmax_ptr": absmax, "nested_ptr": nested, "offset_ptr": offset}
    return tensors | {"code_ptr": nf4_code(device), "map_ptr": dynamic_map(device)}


def prepare_dequantize(num_words: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and what the kernel is compiled for."""
    return (cdiv(num_words, WORDS),), {"BLOCK": WORDS, "num_warps": 4, **ROUNDED}


def prepare_with_update(N: int, K: int, RANK: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the tiles."""
    grid, tiles = prepare_update(N, K, RANK)
    return grid, tiles | ROUNDED


def prepare_gemm(M: int, N: int, K: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and tiles: fewer outputs per program where that is what keeps all processors busy."""
    block_n = 16 if N <= 2048 else 32 if N <= 8192 else 64
    tiles = {"BLOCK_M": 16 if M <= 16 else 32 if M <= 32 else 64, "BLOCK_N": block_n, "BLOCK_K": 128, "NUM_STAGES": 3}
    return (cdiv(N, block_n),), tiles | {"num_warps": 4, **ROUNDED}


DEQUANTIZE = KernelLauncher(nf4_dequantize_kernel, prepare_dequantize)
UPDATED = KernelLauncher(nf4_updated_kernel, prepare_with_update)
GEMM = KernelLauncher(nf4_gemm_kernel, prepare_gemm)


def dequantize(matrix: NF4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix `[N, K]`, whole words."""
    tables = tables_of(matrix)
    words = tables.pop("values_ptr").flatten().view(torch.int32)
    y = torch.empty(len(matrix.values), matrix.inputs, dtype=dtype, device=words.device)
    DEQUANTIZE(y, {"y_ptr": y, "words_ptr": words} | tables, num_words=words.numel())
    return y


def with_update(matrix: NF4Matrix, A: Tensor, B: Tensor) -> Tensor:
    """`W + B A` for a matrix `[N, K]` whose rows are whole words, `A [rank, K]` and `B [N, rank]`."""
    tables = tables_of(matrix)
    words = tables.pop("values_ptr").view(torch.int32)
    N, (rank, K) = len(B), A.shape
    y = torch.empty(N, K, dtype=A.dtype, device=A.device)
    tensors = {"y_ptr": y, "a_ptr": A.contiguous(), "b_ptr": B.contiguous(), "words_ptr": words} | tables
    UPDATED(y, tensors, N=N, K=K, RANK=rank)
    return y


def multiply(x: Tensor, matrix: NF4Matrix) -> Tensor:
    """`x W^T` for up to 64 rows."""
    rows = x.reshape(-1, matrix.inputs).contiguous()
    (M, K), N = rows.shape, len(matrix.values)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    GEMM(y, {"y_ptr": y, "x_ptr": rows} | tables_of(matrix), M=M, N=N, K=K)
    return y.view(*x.shape[:-1], N)
