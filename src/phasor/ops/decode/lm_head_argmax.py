"""The end of a step: logits, the likeliest token of every row, and everything counted on for the next step."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.gemv import Norm, settings
from phasor.ops.decode.small_gemm import product
from phasor.ops.decode.tiles import Tiles
from phasor.ops.int8 import Matrix
from phasor.ops.pdl import pdl_launch, pdl_wait

LOWEST = -(1 << 63)  # less than every vote


@triton.jit
def vote_kernel(
    x, norm, offset, eps, weight, scale, bias, multiplier, logits, best, rows, features,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Logits, and in `best [rows]` the greatest of a row with its token: see `finish_kernel`."""
    feature = tl.program_id(0) * N + tl.arange(0, N)
    outputs = tl.minimum(feature, features - 1)
    y = product(x, norm, offset, eps, weight, scale, outputs, rows, M, K, N, BLOCK_K, STAGES, USE_PDL, BYTES)
    if bias is not None:
        y += tl.load(bias + outputs).to(tl.float32)[None, :]
    said = (multiplier * y).to(logits.dtype.element_ty)
    row = tl.arange(0, M)[:, None]
    tl.store(logits + row * features + feature[None, :], said, mask=(row < rows) & (feature < features)[None, :])
    bits = said.to(tl.float32).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # whole numbers in the order of the logits
    votes = (order << 32) | (0x7FFFFFFF - outputs).to(tl.int64)[None, :]  # of equals the first
    tl.atomic_max(best + tl.arange(0, M), tl.max(votes, axis=1), mask=tl.arange(0, M) < rows, sem="relaxed")


@triton.jit
def finish_kernel(
    best, tokens, history, turn, counts, positions, rows, turns,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The tokens voted for become the next step's, go into the history, and everything counts on."""
    pdl_wait(USE_PDL)
    row = tl.arange(0, BLOCK)
    inside = row < rows
    token = 0x7FFFFFFF - (tl.load(best + row, mask=inside, other=0) & 0xFFFFFFFF)
    tl.store(best + row, tl.full([BLOCK], -(1 << 63), tl.int64), mask=inside)
    tl.store(tokens + row, token, mask=inside)
    now = tl.load(turn)
    tl.store(history + (now % turns) * rows + row, token, mask=inside)
    tl.store(counts + row, tl.load(counts + row, mask=inside, other=0) + 1, mask=inside)
    tl.store(positions + row, tl.load(positions + row, mask=inside, other=0) + 1, mask=inside)
    tl.debug_barrier()
    tl.store(turn, now + 1)


def vote(
    x: Tensor,
    matrix: Matrix,
    logits: Tensor,
    best: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    multiplier: float = 1.0,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Logits `[rows, vocab]`, and votes for their greatest into `best`, an int64 `[rows]` of -2^63 before."""
    tiles, first, names = settings(x, matrix, norm, tiles, pdl)
    rows, features = logits.shape
    grid = (triton.cdiv(features, tiles.outputs),)
    vote_kernel[grid](*first, bias, multiplier, logits, best, rows, features, **names)


def finish(
    best: Tensor,
    tokens: Tensor,
    history: Tensor,
    turn: Tensor,
    counts: Tensor,
    positions: Tensor,
    pdl: bool = False,
) -> None:
    """Let the tokens voted for be the next step's, and count on; `history` is a ring `[turns, rows]`."""
    rows, block = len(tokens), triton.next_power_of_2(len(tokens))
    where = (best, tokens, history, turn, counts, positions)
    finish_kernel[(1,)](*where, rows, len(history), block, USE_PDL=pdl, num_warps=1, **pdl_launch(pdl))
