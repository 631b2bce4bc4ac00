"""Magnitudes times the cosines and sines of their phases, and the gradients, in one pass over memory each.

A program takes some tokens and the heads that share their phases. It computes cosines and sines once, and goes through
the heads one by one; its share of the gradient of the shifts is a sum in its registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2
from phasor.ops.polar.reference import PolarArgs
from phasor.ops.rope.kernels import head_strides, phase_cos_sin

ELEMENTS, WARPS = 1024, 4  # of a program: 8 features per thread, a load of 16 bytes in 16 bits


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, with `log(1 + e) = 2 atanh(e / (2 + e))`: `e` is at most 1, and the series below 1e-8."""
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    t = s * s
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2 * s * series


@triton.jit
def load_cos_sin(phase_ptr, shift_ptr, row, group, mask, HEAD_DIM: tl.constexpr):
    """Cosines and sines `[R, C]` of the phases of rows `[R, 1]`, less the shifts of a group of heads."""
    cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    phase = tl.load(phase_ptr + row * HEAD_DIM + cols, mask, other=0)
    if shift_ptr is not None:
        phase -= tl.load(shift_ptr + group * HEAD_DIM + cols, cols < HEAD_DIM, other=0)
    return phase_cos_sin(phase)


@triton.jit(do_not_specialize=["T", "ROWS"])
def forward_kernel(
    phase_ptr, shift_ptr, x_ptr, out_ptr,
    ROWS, T, stride_xb, stride_xt, stride_xg, stride_xh,  # of the input: batch, token, group of heads, head
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    POSITIVE: tl.constexpr, PHASES_BY_ROW: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Heads `[B, T, K, GROUP_SIZE, D]` of some tokens and one group of phases, as `[B, T, H, 2 D]`."""
    HEADS: tl.constexpr = NUM_HEADS // GROUPS
    group = (tl.program_id(0) % GROUPS).to(tl.int64)
    row = (tl.program_id(0) // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    mask = (row < ROWS) & (cols < HEAD_DIM)
    b, t = row // T, row % T
    cos, sin = load_cos_sin(phase_ptr, shift_ptr, row if PHASES_BY_ROW else t, group, mask, HEAD_DIM)
    x_ptr += b * stride_xb + t * stride_xt + cols
    out_ptr += row * (2 * NUM_HEADS * HEAD_DIM) + cols
    for i in range(HEADS):
        head = group * HEADS + i
        x = tl.load(x_ptr + (head // GROUP_SIZE * stride_xg + head % GROUP_SIZE * stride_xh), mask, other=0.0)
        x = x.to(tl.float32)
        magnitude = x if POSITIVE else softplus(x)
        head_ptr = out_ptr + head * (2 * HEAD_DIM)
        tl.store(head_ptr, (magnitude * cos).to(out_ptr.dtype.element_ty), mask)
        tl.store(head_ptr + HEAD_DIM, (magnitude * sin).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T", "ROWS"])
def backward_kernel(
    phase_ptr, shift_ptr, x_ptr, dy_ptr, dx_ptr, dshift_ptr,
    ROWS, T, stride_xb, stride_xt, stride_xg, stride_xh, stride_db, stride_dt, stride_dh,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    POSITIVE: tl.constexpr, PHASES_BY_ROW: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients `[B, T, H, D]` of heads, of `dy` `[B, T, H, 2 D]`, and shares `[blocks, GROUPS, D]` of the shifts'."""
    HEADS: tl.constexpr = NUM_HEADS // GROUPS
    group, block = (tl.program_id(0) % GROUPS).to(tl.int64), (tl.program_id(0) // GROUPS).to(tl.int64)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    mask = (row < ROWS) & (cols < HEAD_DIM)
    b, t = row // T, row % T
    cos, sin = load_cos_sin(phase_ptr, shift_ptr, row if PHASES_BY_ROW else t, group, mask, HEAD_DIM)
    x_ptr += b * stride_xb + t * stride_xt + cols
    dy_ptr += b * stride_db + t * stride_dt + cols
    dx_ptr += row * (NUM_HEADS * HEAD_DIM) + cols
    dshift = tl.zeros(cos.shape, tl.float32)
    for i in range(HEADS):
        head = group * HEADS + i
        dcos = tl.load(dy_ptr + head * stride_dh, mask, other=0.0).to(tl.float32)
        dsin = tl.load(dy_ptr + (head * stride_dh + HEAD_DIM), mask, other=0.0).to(tl.float32)
        dx = dcos * cos + dsin * sin
        if not POSITIVE or dshift_ptr is not None:
            x = tl.load(x_ptr + (head // GROUP_SIZE * stride_xg + head % GROUP_SIZE * stride_xh), mask, other=0.0)
            x = x.to(tl.float32)
            if dshift_ptr is not None:
                dshift += (x if POSITIVE else softplus(x)) * (dcos * sin - dsin * cos)
            if not POSITIVE:
                dx *= tl.sigmoid(x)
        tl.store(dx_ptr + head * HEAD_DIM, dx.to(dx_ptr.dtype.element_ty), mask)
    if dshift_ptr is not None:
        col = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        tl.store(dshift_ptr + (block * GROUPS + group) * HEAD_DIM + col, tl.sum(dshift, 0), col < HEAD_DIM)


class PolarLayout(NamedTuple):
    """All that the grid and the scalars of a launch depend on: shapes, strides and options."""

    shape: Sequence[int]
    strides: Sequence[int]
    dy_strides: Sequence[int] | None
    phase_rows: int
    groups: int
    positive: bool


def block_size(head_dim: int) -> int:
    """The tokens of a program."""
    return max(ELEMENTS // next_power_of_2(head_dim), 1)


def prepare(layout: PolarLayout) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, the scalar arguments by name, and the options of a launch."""
    (rows, tokens, kv_groups), head_dim = layout.shape[:3], layout.shape[-1]
    group_size = layout.shape[3] if len(layout.shape) == 5 else 1
    stride_g, stride_h = head_strides(layout.strides, group_size)
    args = {
        "ROWS": rows * tokens, "T": tokens,
        "stride_xb": layout.strides[0], "stride_xt": layout.strides[1], "stride_xg": stride_g, "stride_xh": stride_h,
        "GROUPS": layout.groups, "NUM_HEADS": kv_groups * group_size, "GROUP_SIZE": group_size, "HEAD_DIM": head_dim,
        "POSITIVE": layout.positive, "PHASES_BY_ROW": layout.phase_rows > 1, "BLOCK_T": block_size(head_dim),
    }  # fmt: skip
    if layout.dy_strides is not None:
        args |= dict(zip(("stride_db", "stride_dt", "stride_dh"), layout.dy_strides, strict=False))
    return (cdiv(rows * tokens, args["BLOCK_T"]) * layout.groups,), args | {"num_warps": WARPS}


launch_forward = KernelLauncher(forward_kernel, prepare)
launch_backward = KernelLauncher(backward_kernel, prepare)


def with_contiguous_features(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def polar_forward(x: Tensor, args: PolarArgs, positive: bool, out: Tensor) -> None:
    """Write the features `[B, T, H, 2 D]` of heads `[B, T, H, D]` or `[B, T, K, H/K, D]`, of any strides."""
    if x.numel() == 0:
        return
    x, phases, shifts = with_contiguous_features(x), args.phases.contiguous(), contiguous(args.shifts)
    groups = 1 if shifts is None else len(shifts)
    tensors = {"phase_ptr": phases, "shift_ptr": shifts, "x_ptr": x, "out_ptr": out}
    launch_forward(x, tensors, PolarLayout(x.shape, x.stride(), None, len(phases), groups, positive))


def polar_backward(dy: Tensor, x: Tensor, args: PolarArgs, positive: bool, dx: Tensor) -> Tensor | None:
    """Write the gradient of heads, contiguous, and return that of the shifts where there are `radians`."""
    if x.numel() == 0:
        return None if args.radians is None else torch.zeros_like(args.radians)
    dy, x = with_contiguous_features(dy), with_contiguous_features(x)
    phases, shifts = args.phases.contiguous(), contiguous(args.shifts)
    groups = 1 if shifts is None else len(shifts)
    blocks = cdiv(x.shape[0] * x.shape[1], block_size(x.shape[-1]))
    shape = (blocks, groups, x.shape[-1])
    parts = None if args.radians is None else dy.new_empty(shape, dtype=torch.float32)
    tensors = {
        "phase_ptr": phases, "shift_ptr": shifts, "x_ptr": x, "dy_ptr": dy, "dx_ptr": dx, "dshift_ptr": parts,
    }  # fmt: skip
    launch_backward(x, tensors, PolarLayout(x.shape, x.stride(), dy.stride()[:3], len(phases), groups, positive))
    return None if parts is None else parts.sum(0)
