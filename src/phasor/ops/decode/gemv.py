"""Projections of a few rows (GEMV), bound by reading their weights: norm, bias, activation and residual are fused.

With more rows a norm or an activation is a kernel by itself.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import NormArgs
from phasor.ops.decode.small_gemm import small_gemm
from phasor.ops.decode.tiles import Tiles, choose_tiles
from phasor.ops.launch import supports_ptx
from phasor.ops.pdl import pdl_launch, pdl_wait
from phasor.ops.quantized import Int4Matrix, Matrix

MAX_GEMV_ROWS = 1  # for more rows a matrix multiplication of torch is faster
# Torch would have to convert quantized weights first. The range of float16 is too small for several rows.
MAX_GEMV_ROWS_QUANTIZED = {torch.bfloat16: 64, torch.float32: 16}


@triton.jit
def activate_tile(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(x)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu-tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def project_kernel(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, bias_ptr, residual_ptr, multiplier, out_ptr, M, N,
    BLOCK_M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, INTEGER_ASM: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * (norm(x) W^T + bias)`, without the terms whose pointers are None."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(offs_n, N - 1)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offsets, mask = offs_m * N + offs_n[None, :], (offs_m < M) & (offs_n < N)[None, :]
    residual_ptrs = None
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + offsets
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    acc, residual = small_gemm(
        x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, outputs, M, residual_ptrs, mask,
        BLOCK_M, K, BLOCK_N, BLOCK_K, NUM_STAGES, USE_PDL, INTEGER_ASM, SCALE_GROUP,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += bias
    if residual_ptr is not None:
        acc = residual + multiplier * acc
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def project_activate_kernel(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, bias_ptr, out_ptr, M, N,
    ACTIVATION: tl.constexpr, GLU: tl.constexpr,
    BLOCK_M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, INTEGER_ASM: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """`out = act(norm(x) W^T + bias)`; with GLU `act(gate) * up`, the gates being the first half of W's rows."""
    if GLU:  # each gate beside its up
        pair = tl.arange(0, 2 * BLOCK_N)
        outputs = tl.minimum(tl.program_id(0) * BLOCK_N + pair // 2, N - 1) + (pair % 2) * N
        acc, _ = small_gemm(
            x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, outputs, M, None, None,
            BLOCK_M, K, 2 * BLOCK_N, BLOCK_K, NUM_STAGES, USE_PDL, INTEGER_ASM, SCALE_GROUP,
        )  # fmt: skip
    else:
        outputs = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
        acc, _ = small_gemm(
            x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, outputs, M, None, None,
            BLOCK_M, K, BLOCK_N, BLOCK_K, NUM_STAGES, USE_PDL, INTEGER_ASM, SCALE_GROUP,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    if GLU:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        y = activate_tile(gate, ACTIVATION) * up
    else:
        y = activate_tile(acc, ACTIVATION)
    offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + offs_m * N + offs_n, y.to(out_ptr.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


@triton.jit
def activate_kernel(x_ptr, out_ptr, N, ACTIVATION: tl.constexpr, GLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """`project_activate_kernel` after the matrix product: `act(x)`, or `act(gate) * up` of the two side by side."""
    offs_n, row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    mask = offs_n < N
    x_ptrs = x_ptr + row * N * (2 if GLU else 1) + offs_n
    y = activate_tile(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GLU:
        y *= tl.load(x_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + offs_n, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def normalize_kernel(
    x_ptr, norm_ptr, norm_offset, eps, out_ptr, D, BLOCK_D: tl.constexpr, USE_PDL: tl.constexpr
):  # fmt: skip
    """A row of `x [M, D]`: the RMS norm."""
    offs_d, row = tl.arange(0, BLOCK_D), tl.program_id(0).to(tl.int64)
    mask = offs_d < D
    weight = norm_offset + tl.load(norm_ptr + offs_d, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * D + offs_d, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    tl.store(out_ptr + row * D + offs_d, y.to(out_ptr.dtype.element_ty), mask=mask)


class LaunchArguments(NamedTuple):
    """What every projection kernel is launched with: its tiles, its first arguments, and its keyword arguments."""

    tiles: Tiles
    args: list[Any]
    kwargs: dict[str, Any]


def launch_arguments(
    x: Tensor, matrix: Matrix, norm: NormArgs | None, tiles: Tiles | None, pdl: bool, glu: bool = False
) -> LaunchArguments:
    """How a kernel is launched for these rows and weights."""
    rows, inputs = x.shape
    weight, scale = (matrix, None) if isinstance(matrix, Tensor) else matrix[:2]
    group = matrix.group_size if isinstance(matrix, Int4Matrix) else 0
    bits = 16 if scale is None else 4 if group else 8
    tiles = tiles or choose_tiles(rows, len(weight), inputs, bits=bits, glu=glu)
    pdl = pdl and (rows == 1 or scale is None)  # tiles that are converted leave no room for another kernel's
    block_k = max(min(tiles.block_k, max(16, triton.next_power_of_2(inputs))), group)
    weight = weight.view(torch.int32) if group and rows == 1 else weight  # 128 bits are a thread's share of a row
    kwargs = {
        "BLOCK_M": 1 if rows == 1 else max(16, triton.next_power_of_2(rows)),
        "K": inputs,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": block_k,
        "NUM_STAGES": tiles.num_stages,
        "USE_PDL": pdl,
        "INTEGER_ASM": scale is not None and supports_ptx(x.device),
        "SCALE_GROUP": group,
        "num_warps": tiles.num_warps if scale is None else max(1, tiles.num_warps * block_k // tiles.block_k),
    }
    args = [x, *(norm or (None, 0.0, 0.0)), weight, scale]
    return LaunchArguments(tiles, args, kwargs | pdl_launch(pdl))


def project(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    *,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`out = residual + multiplier * (norm(x) W^T + bias)` of rows `[rows, inputs]`; `out` may be the residual."""
    tiles, args, kwargs = launch_arguments(x, matrix, norm, tiles, pdl)
    rows, outputs = out.shape
    grid = (triton.cdiv(outputs, tiles.block_n),)
    project_kernel[grid](*args, bias, residual, multiplier, out, rows, outputs, **kwargs)
    return out


def project_activate(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    activation: str,
    *,
    glu: bool,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`out = act(norm(x) W^T + bias)`; with `glu`, `act(gate) * up` of the first and the second half of the outputs."""
    tiles, args, kwargs = launch_arguments(x, matrix, norm, tiles, pdl, glu)
    rows, outputs = out.shape
    grid = (triton.cdiv(outputs, tiles.block_n),)
    project_activate_kernel[grid](*args, bias, out, rows, outputs, activation, glu, **kwargs)
    return out


def activate(x: Tensor, out: Tensor, activation: str, *, glu: bool) -> Tensor:
    """`act(x)` into `out [rows, outputs]`; with `glu`, `act(gate) * up` of the first and the second half of `x`."""
    rows, outputs = out.shape
    activate_kernel[(triton.cdiv(outputs, 1024), rows)](x, out, outputs, activation, glu, 1024)
    return out


def normalize(x: Tensor, norm: NormArgs, *, pdl: bool = False) -> Tensor:
    """The RMS norm of rows `[rows, D]`."""
    out, (rows, width) = torch.empty_like(x), x.shape
    block_d = triton.next_power_of_2(width)
    num_warps = max(1, min(8, block_d // 512))
    normalize_kernel[rows,](x, *norm, out, width, block_d, pdl, num_warps=num_warps, **pdl_launch(pdl))
    return out
