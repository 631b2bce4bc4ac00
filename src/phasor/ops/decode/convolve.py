"""One token of a causal convolution: with the projection that gives its channels, or by itself after a GEMM of torch.

A projection's columns are in groups, of which the first are convolved and then activated by silu. One program has a
column, so that the inputs it keeps are replaced where they are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import ConvolutionArgs, NormArgs
from phasor.ops.decode.gemv import launch_arguments
from phasor.ops.decode.small_gemm import small_gemm
from phasor.ops.decode.tiles import Tiles
from phasor.ops.launch import next_power_of_2
from phasor.ops.pdl import pdl_launch, pdl_wait
from phasor.ops.quantized import Matrix

BLOCK = 512  # columns of a program that only convolves


@triton.jit
def load_taps(
    weight_ptr, bias_ptr, state_ptr, slots, channel, mask, channels, TAPS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """The earlier inputs of channels `[BLOCK_M, BLOCK_N, BLOCK_T]`, where they are, and what they add to the result.

    Then the weights of the inputs to come. `slots` are those of rows, `mask` says which of `[BLOCK_M, BLOCK_N]` exist.
    """
    offs_t = tl.arange(0, BLOCK_T)[None, None, :]
    state_ptrs = state_ptr + slots[:, None, None] * ((TAPS - 1) * channels) + channel[None, :, None] + offs_t * channels
    earlier = mask[:, :, None] & (offs_t < TAPS - 1)
    taps = tl.load(state_ptrs, mask=earlier, other=0.0)
    channel = tl.minimum(channel, channels - 1)  # of columns that are not convolved, any
    weight_ptrs = weight_ptr + channel[None, :, None] * TAPS + offs_t
    weights = tl.load(weight_ptrs, mask=offs_t < TAPS - 1, other=0.0).to(tl.float32)
    early = tl.sum(taps.to(tl.float32) * weights, axis=2)
    last = tl.load(weight_ptr + channel[None, :] * TAPS + (TAPS - 1)).to(tl.float32)
    if bias_ptr is not None:
        early += tl.load(bias_ptr + channel[None, :]).to(tl.float32)
    return taps, state_ptrs, early, last


@triton.jit
def convolve_tile(x, taps, state_ptrs, early, last, mask, channels, TAPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The convolved and activated `x [BLOCK_M, BLOCK_N]`, float32; the inputs that are kept move on by one.

    Several threads may have loaded the same ones, and none writes before all of them have.
    """
    x = x.to(state_ptrs.dtype.element_ty)  # as it is kept
    offs_t = tl.arange(0, BLOCK_T)[None, None, :]
    tl.debug_barrier()
    tl.store(state_ptrs - channels, taps, mask=mask[:, :, None] & (offs_t >= 1) & (offs_t < TAPS - 1))
    tl.store(state_ptrs, x[:, :, None] + tl.zeros_like(taps), mask=mask[:, :, None] & (offs_t == TAPS - 2))
    y = early + last * x.to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def project_convolve_kernel(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, bias_ptr,
    conv_ptr, conv_bias_ptr, state_ptr, slots_ptr, out_ptr, other_weight_ptr, other_out_ptr, M, N, other_N, channels,
    GROUP: tl.constexpr, CONVOLVED: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, INTEGER_ASM: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """`out = convolve(norm(x) W^T + bias)`. What is kept is read before the wait: steps alone write it.

    The last programs have the other projection, `norm(x) other^T`, if there is one.
    """
    pid, num_blocks = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    is_other = pid >= num_blocks
    if other_weight_ptr is not None:
        weight_ptr, out_ptr = (
            tl.where(is_other, other_weight_ptr, weight_ptr),
            tl.where(is_other, other_out_ptr, out_ptr),
        )
        N, pid = tl.where(is_other, other_N, N), tl.where(is_other, pid - num_blocks, pid)
    offs_m, offs_n = tl.arange(0, BLOCK_M), pid * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs, mask = tl.minimum(offs_n, N - 1), (offs_m < M)[:, None] & (offs_n < N)[None, :]
    own, slots = outputs % GROUP, offs_m.to(tl.int64)
    channel, convolved = outputs // GROUP * CONVOLVED + own, mask & (own < CONVOLVED)[None, :] & ~is_other
    if slots_ptr is not None:
        slots = tl.load(slots_ptr + offs_m, mask=offs_m < M, other=0)
    if BLOCK_M == 1:
        taps, state_ptrs, early, last = load_taps(
            conv_ptr, conv_bias_ptr, state_ptr, slots, channel, convolved, channels, TAPS, BLOCK_T
        )
    acc, _ = small_gemm(
        x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, outputs, M, None, None,
        BLOCK_M, K, BLOCK_N, BLOCK_K, NUM_STAGES, USE_PDL, INTEGER_ASM, SCALE_GROUP,
    )  # fmt: skip
    if BLOCK_M > 1:  # in the loop over inputs they would take too many registers
        taps, state_ptrs, early, last = load_taps(
            conv_ptr, conv_bias_ptr, state_ptr, slots, channel, convolved, channels, TAPS, BLOCK_T
        )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=(outputs < N) & ~is_other, other=0.0).to(tl.float32)[None, :]
    y = convolve_tile(acc, taps, state_ptrs, early, last, convolved, channels, TAPS, BLOCK_T)
    y = tl.where(convolved, y, acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], y, mask=mask)


@triton.jit
def convolve_kernel(
    x_ptr, conv_ptr, conv_bias_ptr, state_ptr, slots_ptr, stride_x, channels,
    GROUP: tl.constexpr, CONVOLVED: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`project_convolve_kernel` after the matrix product: columns of a group, in place."""
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    convolved, channel, slot = own < CONVOLVED, group * CONVOLVED + own, row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)
    taps, state_ptrs, early, last = load_taps(
        conv_ptr, conv_bias_ptr, state_ptr, slot + tl.zeros([1], tl.int64), channel, convolved[None, :], channels,
        TAPS, BLOCK_T,
    )  # fmt: skip
    pdl_wait(USE_PDL)
    x_ptrs = x_ptr + row * stride_x + group * GROUP + own[None, :]
    x = tl.load(x_ptrs, mask=convolved[None, :], other=0.0).to(tl.float32)
    y = convolve_tile(x, taps, state_ptrs, early, last, convolved[None, :], channels, TAPS, BLOCK_T)
    tl.store(x_ptrs, y.to(x_ptr.dtype.element_ty), mask=convolved[None, :])


def sizes_of(conv: ConvolutionArgs) -> dict[str, int]:
    """The sizes of a convolution by the names that kernels have for them."""
    channels, taps = conv.weight.shape
    return {
        "channels": channels,
        "GROUP": conv.group,
        "CONVOLVED": conv.convolved,
        "TAPS": taps,
        "BLOCK_T": next_power_of_2(max(1, taps - 1)),
    }


def project_convolve(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    conv: ConvolutionArgs,
    *,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    other: tuple[Tensor, Tensor] | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`out = convolve(norm(x) W^T + bias)` of rows `[rows, inputs]`, with the next inputs of each row's convolution.

    `other` are the weights of another projection of `norm(x)`, of the same dtype, and where its results go.
    """
    tiles, args, kwargs = launch_arguments(x, matrix, norm, tiles, pdl)
    rows, outputs = out.shape
    other_weight, other_out = other or (None, None)
    other_outputs = 0 if other_weight is None else len(other_weight)
    grid = (triton.cdiv(outputs, tiles.block_n) + triton.cdiv(other_outputs, tiles.block_n),)
    tensors = conv.weight, conv.bias, conv.state, conv.slots, out, other_weight, other_out
    project_convolve_kernel[grid](*args, bias, *tensors, rows, outputs, other_outputs, **sizes_of(conv), **kwargs)
    return out


def convolve(x: Tensor, conv: ConvolutionArgs, *, pdl: bool = False) -> Tensor:
    """Replace the next inputs of each row's convolution in `x [rows, outputs]` by its results."""
    rows, outputs = x.shape
    block = min(BLOCK, next_power_of_2(conv.convolved))
    convolve_kernel[(triton.cdiv(conv.convolved, block), outputs // conv.group, rows)](
        x, conv.weight, conv.bias, conv.state, conv.slots, outputs, **sizes_of(conv), BLOCK_N=block, USE_PDL=pdl,
        num_warps=4, **pdl_launch(pdl),
    )  # fmt: skip
    return x
