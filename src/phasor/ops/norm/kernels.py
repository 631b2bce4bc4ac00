"""Norms as Triton kernels. A program holds whole rows; weight gradients are summed per program, then over programs.

What the gradient needs of each row is in `stats [1 or 2, M]`: the reciprocal scale, then the mean if CENTERED.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, empty_dense, next_power_of_2

SUM_ROWS, SUM_COLUMNS = 128, 16  # of a tile of what is summed over programs


@triton.jit
def normalize(x, stats_ptr, rows, mask, M, D, eps, CENTERED: tl.constexpr):
    """Rows of `x`, zero outside of `mask`: subtract the mean if CENTERED, divide by the scale, store both."""
    if CENTERED:
        mean = tl.sum(x, 1) / D
        tl.store(stats_ptr + M + rows, mean, mask=rows < M)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(stats_ptr + rows, rstd, mask=rows < M)
    return x * rstd[:, None]


@triton.jit
def scale_and_shift(y, w_ptr, b_ptr, cols, D, offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """`y * (offset + weight) + bias`."""
    if HAS_WEIGHT:
        y *= load_scale(w_ptr, cols, D, offset)
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def load_scale(w_ptr, cols, D, offset):
    """`offset + weight`, `[1, BLOCK_D]`."""
    return offset + tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_norm(x_ptr, stats_ptr, rows, offsets, mask, M, CENTERED: tl.constexpr):
    """Rows of `x`, normalized once more by their `stats`; and their reciprocal scale, `[BLOCK_M, 1]`."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)[:, None]
    if CENTERED:
        x -= tl.load(stats_ptr + M + rows, mask=rows < M, other=0.0)[:, None]
    return tl.where(mask, x * rstd, 0.0), rstd


@triton.jit
def normalize_gradient(dy, y, rstd, D, CENTERED: tl.constexpr):
    """The gradient of what was normalized to `y`, from that of `y`; not zero outside of the mask if CENTERED."""
    dx = dy - y * (tl.sum(dy * y, 1) / D)[:, None]
    if CENTERED:
        dx -= (tl.sum(dy, 1) / D)[:, None]
    return dx * rstd


@triton.jit
def _norm_forward_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    total_ptr,
    y_ptr,
    stats_ptr,
    M,
    D,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M rows of `x [M, D]`: add the residual, normalize, scale and shift."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    offsets = rows[:, None] * D + cols[None, :]
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)  # the norm is that of the sum as it is stored
    y = normalize(x, stats_ptr, rows, mask, M, D, eps, CENTERED)
    y = scale_and_shift(y, w_ptr, b_ptr, cols, D, offset, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    w_ptr,
    stats_ptr,
    dx_ptr,
    sums_ptr,
    M,
    D,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`dx` of every BLOCK_M-th block of rows, and this program's share of `dw` and `db`: `sums [programs, 0..2, D]`."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    col_mask = cols < D
    if HAS_WEIGHT:
        w = load_scale(w_ptr, cols, D, offset)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    for block in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        offsets = rows[:, None] * D + cols[None, :]
        mask = (rows < M)[:, None] & col_mask[None, :]
        y, rstd = load_norm(x_ptr, stats_ptr, rows, offsets, mask, M, CENTERED)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            db += tl.sum(dy, 0)
        if HAS_WEIGHT:
            dw += tl.sum(dy * y, 0)
            dy *= w
        dx = normalize_gradient(dy, y, rstd, D, CENTERED)
        if HAS_RESIDUAL:
            dx += tl.load(dtotal_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    sums_ptr += pid * D * (HAS_WEIGHT + HAS_BIAS) + cols
    if HAS_WEIGHT:
        tl.store(sums_ptr, dw, mask=col_mask)
        sums_ptr += D
    if HAS_BIAS:
        tl.store(sums_ptr, db, mask=col_mask)


@triton.jit
def _norm_add_forward_kernel(
    x_ptr,
    branch_ptr,
    w_ptr,
    b_ptr,
    next_w_ptr,
    next_b_ptr,
    total_ptr,
    y_ptr,
    stats_ptr,
    M,
    D,
    eps,
    offset,
    HAS_NEXT: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M rows: add the norm of the branch to `x [M, D]`, and if HAS_NEXT take the next norm of that."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    offsets = rows[:, None] * D + cols[None, :]
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    branch = normalize(branch, stats_ptr, rows, mask, M, D, eps, CENTERED)
    branch = scale_and_shift(branch, w_ptr, b_ptr, cols, D, offset, HAS_WEIGHT, HAS_BIAS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + branch
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + offsets, total, mask=mask)
    if HAS_NEXT:
        stats_ptr += M
        if CENTERED:
            stats_ptr += M
        # the norm is that of the sum as it is stored
        y = normalize(total.to(tl.float32), stats_ptr, rows, mask, M, D, eps, CENTERED)
        y = scale_and_shift(y, next_w_ptr, next_b_ptr, cols, D, offset, HAS_WEIGHT, HAS_BIAS)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_add_norm_backward_kernel(
    dtotal_ptr,
    dy_ptr,
    branch_ptr,
    total_ptr,
    w_ptr,
    next_w_ptr,
    stats_ptr,
    dx_ptr,
    dbranch_ptr,
    sums_ptr,
    M,
    D,
    offset,
    HAS_DTOTAL: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`dx` and `dbranch`, and this program's share of the gradients of weights and biases: `sums [programs, 0..4, D]`.

    The `stats` and `sums` of the branch's norm come first, then those of the next.
    """
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    col_mask = cols < D
    next_stats_ptr = stats_ptr + M
    if CENTERED:
        next_stats_ptr += M
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    next_dw = tl.zeros([BLOCK_D], tl.float32)
    next_db = tl.zeros([BLOCK_D], tl.float32)
    for block in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        offsets = rows[:, None] * D + cols[None, :]
        mask = (rows < M)[:, None] & col_mask[None, :]
        dx = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if HAS_DTOTAL:
            dx += tl.load(dtotal_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y, rstd = load_norm(total_ptr, next_stats_ptr, rows, offsets, mask, M, CENTERED)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            next_db += tl.sum(dy, 0)
        if HAS_WEIGHT:
            next_dw += tl.sum(dy * y, 0)
            dy *= load_scale(next_w_ptr, cols, D, offset)
        dx = tl.where(mask, dx + normalize_gradient(dy, y, rstd, D, CENTERED), 0.0)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        branch, branch_rstd = load_norm(branch_ptr, stats_ptr, rows, offsets, mask, M, CENTERED)
        if HAS_BIAS:
            db += tl.sum(dx, 0)
        if HAS_WEIGHT:
            dw += tl.sum(dx * branch, 0)
            dx *= load_scale(w_ptr, cols, D, offset)
        dbranch = normalize_gradient(dx, branch, branch_rstd, D, CENTERED)
        tl.store(dbranch_ptr + offsets, dbranch.to(dbranch_ptr.dtype.element_ty), mask=mask)
    sums_ptr += pid * D * 2 * (HAS_WEIGHT + HAS_BIAS) + cols
    if HAS_WEIGHT:
        tl.store(sums_ptr, dw, mask=col_mask)
        sums_ptr += D
    if HAS_BIAS:
        tl.store(sums_ptr, db, mask=col_mask)
        sums_ptr += D
    if HAS_WEIGHT:
        tl.store(sums_ptr, next_dw, mask=col_mask)
        sums_ptr += D
    if HAS_BIAS:
        tl.store(sums_ptr, next_db, mask=col_mask)


@triton.jit
def _sum_kernel(x_ptr, y_ptr, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum of `x [M, D]` over its rows, of BLOCK_D columns."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < D)[None, :]
        total += tl.load(x_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + cols, tl.sum(total, 0).to(y_ptr.dtype.element_ty), mask=cols < D)


def prepare_rows(
    flag: str,
    count: int,
    width: int,
    eps: float | None,
    offset: float,
    has_flag: bool,
    centered: bool,
    has_weight: bool,
    has_bias: bool,
    programs: int | None,
    num_warps: int | None,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid of some programs, or of one per block of rows, and the scalars; `flag` is one that only a kernel has."""
    block_m, block_d, default_num_warps = block_sizes(width)
    scalars = {
        "M": count, "D": width, "offset": offset, flag: has_flag, "CENTERED": centered, "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias, "BLOCK_M": block_m, "BLOCK_D": block_d, "num_warps": num_warps or default_num_warps,
    }  # fmt: skip
    return (programs or cdiv(count, block_m),), scalars if eps is None else {**scalars, "eps": eps}


def prepare_sum(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid of a program per block of columns, and its blocks."""
    return (cdiv(width, SUM_COLUMNS),), {"M": rows, "D": width, "BLOCK_M": SUM_ROWS, "BLOCK_D": SUM_COLUMNS}


launch_norm_forward = KernelLauncher(_norm_forward_kernel, functools.partial(prepare_rows, "HAS_RESIDUAL"))
launch_norm_backward = KernelLauncher(_norm_backward_kernel, functools.partial(prepare_rows, "HAS_RESIDUAL"))
launch_norm_add_forward = KernelLauncher(_norm_add_forward_kernel, functools.partial(prepare_rows, "HAS_NEXT"))
launch_norm_add_norm_backward = KernelLauncher(
    _norm_add_norm_backward_kernel, functools.partial(prepare_rows, "HAS_DTOTAL")
)
launch_sum = KernelLauncher(_sum_kernel, prepare_sum)


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
    num_warps: int | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The sum (None without a residual), its norm, and the `stats` of its rows."""
    width = x.shape[-1]
    count = x.numel() // width
    y = empty_dense(x, dtype)
    total = None if residual is None else empty_dense(x, torch.promote_types(x.dtype, residual.dtype))
    stats = x.new_empty((2 if centered else 1, count), dtype=torch.float32)
    if count:
        tensors = {
            "x_ptr": x.contiguous(), "residual_ptr": contiguous(residual), "w_ptr": contiguous(weight),
            "b_ptr": contiguous(bias), "total_ptr": total, "y_ptr": y, "stats_ptr": stats,
        }  # fmt: skip
        launch_norm_forward(
            x, tensors, count, width, eps, offset, residual is not None, centered, weight is not None, bias is not None,
            None, num_warps,
        )  # fmt: skip
    return total, y, stats


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
    num_warps: int | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of `x`, and those of weight and bias, as many as there are, in `dtype`: `[0..2, D]`."""
    width, count = x.shape[-1], stats.shape[1]
    block_m, _, _ = block_sizes(width)
    programs = max(1, min(programs or num_programs(x.device), cdiv(count, block_m)))
    dx = empty_dense(x)
    sums = stats.new_empty((programs, (weight is not None) + (bias is not None), width))
    tensors = {
        "dy_ptr": dy.contiguous(), "dtotal_ptr": contiguous(dtotal), "x_ptr": x.contiguous(),
        "w_ptr": contiguous(weight), "stats_ptr": stats, "dx_ptr": dx, "sums_ptr": sums,
    }  # fmt: skip
    launch_norm_backward(
        x, tensors, count, width, None, offset, dtotal is not None, centered, weight is not None, bias is not None,
        programs, num_warps,
    )  # fmt: skip
    return dx, sum_over_programs(sums, dtype)


def norm_add_forward(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    has_next: bool,
    eps: float,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`x` plus the norm of the branch, the next norm of that (None unless `has_next`), and the `stats` of both."""
    width = x.shape[-1]
    count = x.numel() // width
    total = empty_dense(x, dtype)
    y = empty_dense(x, dtype) if has_next else None
    stats = x.new_empty(((1 + has_next) * (1 + centered), count), dtype=torch.float32)
    if count:
        tensors = {
            "x_ptr": x.contiguous(), "branch_ptr": branch.contiguous(), "w_ptr": contiguous(weight),
            "b_ptr": contiguous(bias), "next_w_ptr": contiguous(next_weight), "next_b_ptr": contiguous(next_bias),
            "total_ptr": total, "y_ptr": y, "stats_ptr": stats,
        }  # fmt: skip
        launch_norm_add_forward(
            x, tensors, count, width, eps, offset, has_next, centered, weight is not None, bias is not None, None, None,
        )  # fmt: skip
    return total, y, stats


def norm_add_norm_backward(
    dtotal: Tensor | None,
    dy: Tensor,
    branch: Tensor,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    next_weight: Tensor | None,
    stats: Tensor,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` and branch, and of weights and biases in `dtype`, the branch's first: `[0..4, D]`."""
    width, count = branch.shape[-1], stats.shape[1]
    block_m, _, _ = block_sizes(width)
    programs = max(1, min(num_programs(branch.device), cdiv(count, block_m)))
    dx, dbranch = empty_dense(total), empty_dense(branch)
    sums = stats.new_empty((programs, 2 * ((weight is not None) + (bias is not None)), width))
    tensors = {
        "dtotal_ptr": contiguous(dtotal), "dy_ptr": dy.contiguous(), "branch_ptr": branch.contiguous(),
        "total_ptr": total, "w_ptr": contiguous(weight), "next_w_ptr": contiguous(next_weight), "stats_ptr": stats,
        "dx_ptr": dx, "dbranch_ptr": dbranch, "sums_ptr": sums,
    }  # fmt: skip
    launch_norm_add_norm_backward(
        branch, tensors, count, width, None, offset, dtotal is not None, centered, weight is not None, bias is not None,
        programs, None,
    )  # fmt: skip
    return dx, dbranch, sum_over_programs(sums, dtype)


def sum_over_programs(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of `[programs, weights, D]` over its programs, in float32 and then rounded to `dtype`."""
    programs, weights, width = sums.shape
    total = sums.new_empty((weights, width), dtype=dtype)
    if total.numel():
        launch_sum(sums, {"x_ptr": sums, "y_ptr": total}, programs, weights * width)
    return total


@functools.cache
def block_sizes(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, one row or as many narrow ones as make 1024 elements, and its number of warps."""
    block_d = next_power_of_2(width)
    return max(1, 1024 // block_d), block_d, min(max(block_d // 512, 4), 16)


@functools.cache
def num_programs(device: torch.device) -> int:
    """As many as run at once on a GPU; elsewhere few, so that each has several rows."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
