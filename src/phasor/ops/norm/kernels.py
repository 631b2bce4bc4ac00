"""Norms as Triton kernels. A program holds whole rows; weight gradients are summed per program, then over programs."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, empty_dense, next_power_of_2


@triton.jit
def _norm_forward_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    total_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
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
    """BLOCK_M rows of `x [M, D]`: add the residual, subtract the mean if CENTERED, scale and shift."""
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
    if CENTERED:
        mean = tl.sum(x, 1) / D
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= offset + tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
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
    """`dx` of every BLOCK_M-th block of rows, and this program's share of `dw` and `db`, `[programs, D]`."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    col_mask = cols < D
    if HAS_WEIGHT:
        w = offset + tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    for block in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        offsets = rows[:, None] * D + cols[None, :]
        mask = (rows < M)[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if CENTERED:
            x -= tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
        x = tl.where(mask, x * rstd, 0.0)
        if HAS_WEIGHT:
            dw += tl.sum(dy * x, 0)
        if HAS_BIAS:
            db += tl.sum(dy, 0)
        if HAS_WEIGHT:
            dy *= w
        dx = dy - x * (tl.sum(dy * x, 1) / D)[:, None]
        if CENTERED:
            dx -= (tl.sum(dy, 1) / D)[:, None]
        dx *= rstd
        if HAS_RESIDUAL:
            dx += tl.load(dtotal_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial = pid * D + cols
    if HAS_WEIGHT:
        tl.store(dw_ptr + partial, dw, mask=col_mask)
    if HAS_BIAS:
        tl.store(db_ptr + partial, db, mask=col_mask)


norm_forward_launcher = KernelLauncher(_norm_forward_kernel)
norm_backward_launcher = KernelLauncher(_norm_backward_kernel)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (empty without a residual), its norm, and the mean (empty if not centered) and `rstd` of each row."""
    width = x.shape[-1]
    count = x.numel() // width
    y = empty_dense(x, dtype)
    total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    total = x.new_empty(0) if residual is None else empty_dense(x, total_dtype)
    rstd = y.new_empty(count, dtype=torch.float32)
    mean = y.new_empty(count if centered else 0, dtype=torch.float32)
    block_m, block_d, default_num_warps = block_sizes(width)
    if count:
        args: dict[str, Any] = {
            "x_ptr": x.contiguous(),
            "residual_ptr": contiguous(residual),
            "w_ptr": contiguous(weight),
            "b_ptr": contiguous(bias),
            "total_ptr": total,
            "y_ptr": y,
            "mean_ptr": mean,
            "rstd_ptr": rstd,
            "M": count,
            "D": width,
            "eps": eps,
            "offset": offset,
            "HAS_RESIDUAL": residual is not None,
            "CENTERED": centered,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": block_m,
            "BLOCK_D": block_d,
            "num_warps": num_warps or default_num_warps,
        }
        norm_forward_launcher((cdiv(count, block_m),), x, args)
    return total, y, mean, rstd


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    offset: float,
    centered: bool,
    num_warps: int | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, weight and bias, the last two empty where there is none."""
    width, count = x.shape[-1], len(rstd)
    block_m, block_d, default_num_warps = block_sizes(width)
    programs = max(1, min(programs or num_programs(x.device), cdiv(count, block_m)))
    dx = empty_dense(x)
    partial_sums = [rstd.new_empty(0 if w is None else (programs, width)) for w in (weight, bias)]
    args: dict[str, Any] = {
        "dy_ptr": dy.contiguous(),
        "dtotal_ptr": contiguous(dtotal),
        "x_ptr": x.contiguous(),
        "w_ptr": contiguous(weight),
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dx_ptr": dx,
        "dw_ptr": partial_sums[0],
        "db_ptr": partial_sums[1],
        "M": count,
        "D": width,
        "offset": offset,
        "HAS_RESIDUAL": dtotal is not None,
        "CENTERED": centered,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_M": block_m,
        "BLOCK_D": block_d,
        "num_warps": num_warps or default_num_warps,
    }
    norm_backward_launcher((programs,), x, args)
    dw, db = (
        partial if w is None else partial.sum(0).to(w.dtype)
        for w, partial in zip((weight, bias), partial_sums, strict=True)
    )
    return dx, dw, db


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@functools.cache
def block_sizes(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, one row or as many narrow ones as make 1024 elements, and its number of warps."""
    block_d = next_power_of_2(width)
    return max(1, 1024 // block_d), block_d, min(max(block_d // 512, 4), 16)


@functools.cache
def num_programs(device: torch.device) -> int:
    """As many as run at once on a GPU; elsewhere few, so that each has several rows."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
