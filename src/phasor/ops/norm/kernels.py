"""Norms on a GPU. A program holds whole rows; gradients of weights are summed by program, then over programs."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import on_device


@triton.jit
def _forward(
    xs,
    rs,
    weights,
    biases,
    sums,
    ys,
    means,
    scales,
    N,
    D,
    eps,
    offset,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * D + column[None, :]
    inside = (row < N)[:, None] & (column < D)[None, :]
    x = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(rs + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sums.dtype.element_ty)
        tl.store(sums + at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm is that of the sum as it is kept
    if CENTERED:
        mean = tl.sum(x, 1) / D
        tl.store(means + row, mean, mask=row < N)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(scales + row, scale, mask=row < N)
    y = x * scale[:, None]
    if WEIGHTED:
        y *= offset + tl.load(weights + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        y += tl.load(biases + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(ys + at, y.to(ys.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grads,
    grad_sums,
    xs,
    weights,
    means,
    scales,
    by_xs,
    by_weights,
    by_biases,
    N,
    D,
    offset,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < D
    if WEIGHTED:
        weight = offset + tl.load(weights + column, mask=within, other=0.0).to(tl.float32)[None, :]
    by_weight = tl.zeros([BLOCK], tl.float32)
    by_bias = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        at = row[:, None] * D + column[None, :]
        inside = (row < N)[:, None] & within[None, :]
        x = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < N, other=0.0)[:, None]
        if CENTERED:
            x -= tl.load(means + row, mask=row < N, other=0.0)[:, None]
        x = tl.where(inside, x * scale, 0.0)
        if WEIGHTED:
            by_weight += tl.sum(grad * x, 0)
        if BIASED:
            by_bias += tl.sum(grad, 0)
        if WEIGHTED:
            grad *= weight
        by_x = grad - x * (tl.sum(grad * x, 1) / D)[:, None]
        if CENTERED:
            by_x -= (tl.sum(grad, 1) / D)[:, None]
        by_x *= scale
        if ADDS:
            by_x += tl.load(grad_sums + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(by_xs + at, by_x.to(by_xs.dtype.element_ty), mask=inside)
    into = program * D + column
    if WEIGHTED:
        tl.store(by_weights + into, by_weight, mask=within)
    if BIASED:
        tl.store(by_biases + into, by_bias, mask=within)


def forward(
    x: Tensor,
    r: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (empty if `r` is None), its norm, and the mean (empty if not centered) and factor of each row."""
    width = x.shape[-1]
    count = x.numel() // width
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = x.new_empty(0) if r is None else y.new_empty(x.shape, dtype=torch.promote_types(x.dtype, r.dtype))
    scale = y.new_empty(count, dtype=torch.float32)
    mean = y.new_empty(count if centered else 0, dtype=torch.float32)
    rows, _ = tile(width)
    weight, bias = dense(weight), dense(bias)
    if count:
        with on_device(x):
            _forward[(triton.cdiv(count, rows),)](
                x.contiguous(),
                None if r is None else r.contiguous(),
                weight,
                bias,
                s,
                y,
                mean,
                scale,
                count,
                width,
                eps,
                offset,
                **constants(r, weight, bias, centered, width, warps),
            )
    return s, y, mean, scale


def backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    offset: float,
    centered: bool,
    warps: int | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by `x`, by weight and by bias, the last two empty where there is none."""
    width, count = x.shape[-1], len(scale)
    rows, _ = tile(width)
    weight, bias = dense(weight), dense(bias)
    programs = max(1, min(programs or programs_of(x.device), triton.cdiv(count, rows)))
    by_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = [scale.new_empty(0 if w is None else (programs, width)) for w in (weight, bias)]
    with on_device(x):
        _backward[(programs,)](
            grad.contiguous(),
            None if grad_sum is None else grad_sum.contiguous(),
            x.contiguous(),
            weight,
            mean,
            scale,
            by_x,
            *parts,
            count,
            width,
            offset,
            **constants(grad_sum, weight, bias, centered, width, warps),
        )
    by_weight, by_bias = (
        x.new_empty(0) if w is None else part.sum(0).to(w.dtype) for w, part in zip((weight, bias), parts, strict=True)
    )
    return by_x, by_weight, by_bias


def constants(
    added: Tensor | None, weight: Tensor | None, bias: Tensor | None, centered: bool, width: int, warps: int | None
) -> dict[str, Any]:
    """What both kernels are compiled for."""
    rows, block = tile(width)
    given = {
        "ADDS": added is not None,
        "CENTERED": centered,
        "WEIGHTED": weight is not None,
        "BIASED": bias is not None,
    }
    return given | {"ROWS": rows, "BLOCK": block, "num_warps": warps or warps_of(block)}


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program: one row, or as many narrow ones as make 1024 numbers."""
    block = triton.next_power_of_2(width)
    return max(1, 1024 // block), block


def warps_of(block: int) -> int:
    return min(max(block // 512, 4), 16)


@functools.cache
def programs_of(device: torch.device) -> int:
    """So many that all of them run at once on a GPU; elsewhere few, so that each has several rows."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
