"""Running sums over tokens in two passes, and angles in fixed point in one.

A program adds up some columns of a block of tokens. Where there are several blocks, a first pass gives the sum of each,
which the programs of the second add up to what comes before theirs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2

TILE, MAX_COLUMNS = 64, 32  # tokens and columns that a program adds up at once
BLOCKS = 128  # of tokens, at most: each adds up the sums of all before it
ANGLES = 1024  # of a program


@triton.jit
def load_tile(x_ptr, batch, first, last, col, T, N, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Offsets `[BLOCK_T, BLOCK_D]` of tokens from `first` on, which of them are before `last`, and their elements."""
    index = first + tl.arange(0, BLOCK_T)[:, None]
    token = T - 1 - index if REVERSE else index
    offset = (batch * T + token) * N + col
    mask = (index < last) & (col < N)
    return offset, mask, tl.load(x_ptr + offset, mask, other=0)


@triton.jit(do_not_specialize=["T"])
def totals_kernel(
    x_ptr, totals_ptr, T, N,
    BLOCK_D: tl.constexpr, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The sums `[B, blocks, N]` of blocks of `BLOCK_T * NUM_TILES` tokens of `[B, T, N]`."""
    batch, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    first = block * BLOCK_T * NUM_TILES
    total = tl.zeros((BLOCK_T, BLOCK_D), x_ptr.dtype.element_ty)
    for i in range(NUM_TILES):
        _, _, x = load_tile(x_ptr, batch, first + i * BLOCK_T, T, col, T, N, REVERSE, BLOCK_T)
        total += x
    out = totals_ptr + (batch * tl.num_programs(0) + block) * N + col
    tl.store(out, tl.sum(total, 0)[None, :], col < N)


@triton.jit(do_not_specialize=["T"])
def cumsum_kernel(
    x_ptr, totals_ptr, out_ptr, T, N,
    BLOCK_D: tl.constexpr, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr, NUM_TILES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Running sums of a block of tokens, after the sums of all blocks before it."""
    batch, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    first = block * BLOCK_T * NUM_TILES
    before = tl.zeros((1, BLOCK_D), x_ptr.dtype.element_ty)
    if totals_ptr is not None:
        other = tl.arange(0, MAX_BLOCKS)[:, None]
        totals_ptr += (batch * tl.num_programs(0) + other) * N + col
        before += tl.sum(tl.load(totals_ptr, (other < block) & (col < N), other=0), 0)[None, :]
    for i in range(NUM_TILES):
        offset, mask, x = load_tile(x_ptr, batch, first + i * BLOCK_T, T, col, T, N, REVERSE, BLOCK_T)
        tl.store(out_ptr + offset, before + tl.cumsum(x, 0), mask)
        before += tl.sum(x, 0)[None, :]


launch_totals = KernelLauncher(totals_kernel)
launch_sums = KernelLauncher(cumsum_kernel)


def launch_cumsum(x: Tensor, out: Tensor, *, reverse: bool) -> None:
    """Write the running sums of `[B, T, ...]` over its tokens, or from the last token on, to a contiguous tensor."""
    if x.numel() == 0:
        return
    x = x.contiguous()
    rows, tokens, width = x.shape[0], x.shape[1], x.shape[2:].numel()
    columns = min(next_power_of_2(width), MAX_COLUMNS)
    tiles = cdiv(tokens, BLOCKS * TILE)
    blocks = cdiv(tokens, tiles * TILE)
    grid = blocks, cdiv(width, columns), rows
    shared = {"T": tokens, "N": width, "BLOCK_D": columns, "REVERSE": reverse, "BLOCK_T": TILE, "NUM_TILES": tiles}
    totals = None
    if blocks > 1:
        totals = x.new_empty((rows, blocks, width))
        launch_totals(x, {"x_ptr": x, "totals_ptr": totals}, grid, **shared)
    tensors = {"x_ptr": x, "totals_ptr": totals, "out_ptr": out}
    launch_sums(x, tensors, grid, **shared, MAX_BLOCKS=next_power_of_2(blocks))


@triton.jit
def to_nearest(x):
    """A float64 of less than 2^51, rounded to an integer, halves to even: what float64 cannot hold is dropped."""
    return (x + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2^52


@triton.jit(do_not_specialize=["COUNT"])
def angles_kernel(radians_ptr, own_ptr, out_ptr, COUNT, N, BLOCK: tl.constexpr):
    """Angles in 2^-64 of a rotation: `own` `[N]`, and `radians` `[..., N]` to 52 bits."""
    first, offset = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    index, column = first + offset, ((first % N).to(tl.int32) + offset) % N
    mask = index < COUNT
    turns = tl.load(radians_ptr + index, mask, other=0.0).to(tl.float64) / 6.283185307179586
    learned = to_nearest((turns - to_nearest(turns)) * 4503599627370496.0).to(tl.int64) << 12  # 2^52
    tl.store(out_ptr + index, tl.load(own_ptr + column, mask, other=0) + learned, mask)


launch_fixed = KernelLauncher(angles_kernel)


def launch_angles(radians: Tensor, own: Tensor, out: Tensor) -> None:
    """Write angles in fixed point to a contiguous tensor."""
    if radians.numel():
        tensors = {"radians_ptr": radians.contiguous(), "own_ptr": own.contiguous(), "out_ptr": out}
        count = radians.numel()
        launch_fixed(radians, tensors, (cdiv(count, ANGLES),), COUNT=count, N=len(own), BLOCK=ANGLES)
