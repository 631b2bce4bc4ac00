"""The end of a greedy decoding step: logits, their argmax, and the state of the next step."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import NormArgs
from phasor.ops.decode.gemv import launch_arguments
from phasor.ops.decode.small_gemm import small_gemm
from phasor.ops.decode.tiles import Tiles
from phasor.ops.pdl import pdl_launch, pdl_wait
from phasor.ops.quantized import Matrix

EMPTY_ARGMAX = -(1 << 63)  # less than every packed logit


@triton.jit
def lm_head_argmax_kernel(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, bias_ptr, multiplier, logits_ptr, argmax_ptr, M, N,
    BLOCK_M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, INTEGER_ASM: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """Logits, and in `argmax [M]` the largest of each row packed with its token into 64 bits.

    The upper half is an integer in the order of the logits, the lower half 2^31 - 1 less the token, so that the maximum
    of such integers is the largest logit, and among equal ones the first. A program that cannot exceed what it found
    there at its start leaves `argmax` alone: thousands of atomic operations on one address would take their time.
    """
    row = tl.arange(0, BLOCK_M)
    # Read before the wait: what empties it ends before the step's first kernel begins, and none between them writes it.
    found = tl.load(argmax_ptr + row, mask=row < M, other=0, cache_modifier=".cg")
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(offs_n, N - 1)
    acc, _ = small_gemm(
        x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, outputs, M, None, None,
        BLOCK_M, K, BLOCK_N, BLOCK_K, NUM_STAGES, USE_PDL, INTEGER_ASM, SCALE_GROUP,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    logits = (multiplier * acc).to(logits_ptr.dtype.element_ty)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    tl.store(logits_ptr + offs_m * N + offs_n[None, :], logits, mask=(offs_m < M) & (offs_n < N)[None, :])
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    packed = (order << 32) | (0x7FFFFFFF - outputs).to(tl.int64)[None, :]
    best = tl.max(packed, axis=1)
    tl.atomic_max(argmax_ptr + row, best, mask=(row < M) & (best > found), sem="relaxed")


@triton.jit
def advance_step_kernel(
    argmax_ptr, tokens_ptr, history_ptr, step_ptr, lengths_ptr, positions_ptr, M, history_length,
    BLOCK_M: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Unpack the argmax into the next tokens and the history, reset it, and advance step, lengths and positions."""
    pdl_wait(USE_PDL)
    row = tl.arange(0, BLOCK_M)
    mask = row < M
    token = 0x7FFFFFFF - (tl.load(argmax_ptr + row, mask=mask, other=0) & 0xFFFFFFFF)
    tl.store(argmax_ptr + row, tl.full([BLOCK_M], -(1 << 63), tl.int64), mask=mask)
    tl.store(tokens_ptr + row, token, mask=mask)
    step = tl.load(step_ptr)
    tl.store(history_ptr + (step % history_length) * M + row, token, mask=mask)
    tl.store(lengths_ptr + row, tl.load(lengths_ptr + row, mask=mask, other=0) + 1, mask=mask)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row, mask=mask, other=0) + 1, mask=mask)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def lm_head_argmax(
    x: Tensor,
    matrix: Matrix,
    logits: Tensor,
    argmax: Tensor,
    *,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    multiplier: float = 1.0,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Logits `[rows, vocab]`, and their packed argmax into `argmax`, an int64 `[rows]` filled with `EMPTY_ARGMAX`."""
    tiles, args, kwargs = launch_arguments(x, matrix, norm, tiles, pdl)
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, tiles.block_n),)
    lm_head_argmax_kernel[grid](*args, bias, multiplier, logits, argmax, rows, vocab, **kwargs)


def unpack_argmax(argmax: Tensor) -> Tensor:
    """The tokens of a packed argmax.

    >>> import torch
    >>> unpack_argmax(torch.tensor([(5 << 32) | (2**31 - 1 - 7)])).tolist()
    [7]
    """
    return 0x7FFFFFFF - (argmax & 0xFFFFFFFF)


def advance_step(
    argmax: Tensor,
    tokens: Tensor,
    history: Tensor,
    step: Tensor,
    lengths: Tensor,
    positions: Tensor,
    pdl: bool = False,
) -> None:
    """Make the argmax the next `tokens` and advance the counters; `history [steps, rows]` is a ring buffer."""
    rows, block_m = len(tokens), triton.next_power_of_2(len(tokens))
    buffers = (argmax, tokens, history, step, lengths, positions)
    advance_step_kernel[(1,)](
        *buffers, rows, len(history), BLOCK_M=block_m, USE_PDL=pdl, num_warps=1, **pdl_launch(pdl)
    )
