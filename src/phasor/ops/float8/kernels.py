"""Float8 on a GPU: gated activations and their gradients written as float8 rows, and the transpose of such rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.float8.reference import ALIGNMENT, FLOAT8, FLOAT8_MAX, MIN_SCALE
from phasor.ops.glu.kernels import glu_row, glu_row_backward
from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2

LARGEST, LEAST_SCALE = tl.constexpr(FLOAT8_MAX), tl.constexpr(MIN_SCALE)


@triton.jit
def _row_scale(largest, zero):
    """The scale of a row with this largest absolute value: the least power of two that makes it fit into float8.

    `zero` is NaN where an element of the row is not finite, which float8 values may not show. It is a sum of products
    with 0: a difference `y - y` would be fused with the product that `y` is, and leave its rounding error.
    """
    bits = tl.maximum(largest / LARGEST, LEAST_SCALE).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) + zero


@triton.jit
def _glu_kernel(x_ptr, y_ptr, scale_ptr, H, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    y = glu_row(x_ptr + row * H * 2, offs_n, H, ACTIVATION)
    scale = _row_scale(tl.max(tl.abs(y), 0), tl.sum(y * 0.0, 0))
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * H + offs_n, (y * (1.0 / scale)).to(y_ptr.dtype.element_ty), mask=offs_n < H)


@triton.jit
def _glu_backward_kernel(grad_ptr, x_ptr, dx_ptr, scale_ptr, H, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    dx_ptr += row * H * 2
    dgate, dup, _ = glu_row_backward(grad_ptr + row * H, x_ptr + row * H * 2, offs_n, H, ACTIVATION)
    largest = tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 0)
    scale = _row_scale(largest, tl.sum(dgate * 0.0 + dup * 0.0, 0))
    tl.store(scale_ptr + row, scale)
    tl.store(dx_ptr + offs_n, (dgate * (1.0 / scale)).to(dx_ptr.dtype.element_ty), mask=offs_n < H)
    tl.store(dx_ptr + H + offs_n, (dup * (1.0 / scale)).to(dx_ptr.dtype.element_ty), mask=offs_n < H)


@triton.jit
def _transpose_kernel(x_ptr, factor_ptr, y_ptr, M, N, stride_yn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`x [M, N]` to `y [N, stride_yn]`, whose columns from M on are zeros."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + offs_m, mask=offs_m < M, other=0.0)
        x = (x.to(tl.float32) * factor[:, None]).to(y_ptr.dtype.element_ty)
    y_offsets = offs_n.to(tl.int64)[:, None] * stride_yn + offs_m[None, :]
    tl.store(y_ptr + y_offsets, tl.trans(x), mask=(offs_n < N)[:, None] & (offs_m < stride_yn)[None, :])


launch_glu, launch_glu_backward = KernelLauncher(_glu_kernel), KernelLauncher(_glu_backward_kernel)
launch_transpose = KernelLauncher(_transpose_kernel)


def glu_float8(x: Tensor, kind: str, num_warps: int = 16) -> tuple[Tensor, Tensor]:
    """`act(gate) * up` for `x [rows, 2 h]`, in float8, and the scales of its rows."""
    rows, half = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, half), dtype=FLOAT8, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if y.numel():
        tensors = {"x_ptr": x.contiguous(), "y_ptr": y, "scale_ptr": scale}
        launch_glu(x, tensors, (rows,), H=half, ACTIVATION=kind, BLOCK_N=next_power_of_2(half), num_warps=num_warps)
    return y, scale


def glu_float8_backward(grad: Tensor, x: Tensor, kind: str, num_warps: int = 16) -> tuple[Tensor, Tensor]:
    """The gradient by gate and up, side by side, in float8, and the scales of its rows."""
    rows, half = grad.shape
    dx = torch.empty((rows, 2 * half), dtype=FLOAT8, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if dx.numel():
        tensors = {"grad_ptr": grad.contiguous(), "x_ptr": x.contiguous(), "dx_ptr": dx, "scale_ptr": scale}
        launch_glu_backward(
            x, tensors, (rows,), H=half, ACTIVATION=kind, BLOCK_N=next_power_of_2(half), num_warps=num_warps
        )
    return dx, scale


def transpose(values: Tensor, factor: Tensor | None, tile: tuple[int, int] = (128, 128), num_warps: int = 4) -> Tensor:
    """The transpose of float8 rows, each multiplied by its factor, with zeros up to a multiple of 16."""
    rows, columns = values.shape
    stride = -(-rows // ALIGNMENT) * ALIGNMENT
    y = torch.empty((columns, stride), dtype=FLOAT8, device=values.device)
    if y.numel():
        tensors = {"x_ptr": values.contiguous(), "factor_ptr": contiguous(factor), "y_ptr": y}
        (block_m, block_n), sizes = tile, {"M": rows, "N": columns, "stride_yn": stride}
        grid = cdiv(stride, block_m), cdiv(columns, block_n)
        launch_transpose(values, tensors, grid, **sizes, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps)
    return y
