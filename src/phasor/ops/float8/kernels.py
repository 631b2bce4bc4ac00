"""Float8 on a GPU: gated activations and their gradients as rows of 8 bits, and such rows turned into columns."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.float8.float8 import EIGHT, LARGEST, LEAST
from phasor.ops.glu.kernels import glu_row, glu_row_backward
from phasor.ops.launch import on_device

TOP, LOW = tl.constexpr(LARGEST), tl.constexpr(LEAST)


@triton.jit
def _scale(top, zero):
    """The least power of two, but not below LOW, by which a row with this largest entry has to be divided.

    `zero` is not finite where an entry is not, which 8 bits may not show.
    """
    bits = tl.maximum(top / TOP, LOW).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) + zero


@triton.jit
def _gated(xs, ys, scales, H, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    y = glu_row(xs + row * H * 2, at, H, KIND)
    scale = _scale(tl.max(tl.abs(y), 0), tl.sum(y - y, 0))
    tl.store(scales + row, scale)
    tl.store(ys + row * H + at, (y * (1.0 / scale)).to(ys.dtype.element_ty), mask=at < H)


@triton.jit
def _gated_backward(grads, xs, by_xs, scales, H, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    by_xs += row * H * 2
    by_gate, by_up, _ = glu_row_backward(grads + row * H, xs + row * H * 2, at, H, KIND)
    top = tl.max(tl.maximum(tl.abs(by_gate), tl.abs(by_up)), 0)
    scale = _scale(top, tl.sum((by_gate - by_gate) + (by_up - by_up), 0))
    tl.store(scales + row, scale)
    tl.store(by_xs + at, (by_gate * (1.0 / scale)).to(by_xs.dtype.element_ty), mask=at < H)
    tl.store(by_xs + H + at, (by_up * (1.0 / scale)).to(by_xs.dtype.element_ty), mask=at < H)


@triton.jit
def _turned(xs, factors, ys, R, C, LONG, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < R)[:, None] & (column < C)[None, :]
    x = tl.load(xs + row.to(tl.int64)[:, None] * C + column[None, :], mask=inside, other=0.0)
    if factors is not None:
        factor = tl.load(factors + row, mask=row < R, other=0.0)
        x = (x.to(tl.float32) * factor[:, None]).to(ys.dtype.element_ty)
    to = column.to(tl.int64)[:, None] * LONG + row[None, :]
    tl.store(ys + to, tl.trans(x), mask=(column < C)[:, None] & (row < LONG)[None, :])


def gated(x: Tensor, kind: str, warps: int = 16) -> tuple[Tensor, Tensor]:
    """`act(gate) * up` for `x [rows, 2 h]`, as 8 bits and what each row of them is to be multiplied by."""
    rows, half = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, half), dtype=EIGHT, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if y.numel():
        with on_device(x):
            block = triton.next_power_of_2(half)
            _gated[(rows,)](x.contiguous(), y, scale, half, KIND=kind, BLOCK=block, num_warps=warps)
    return y, scale


def gated_backward(grad: Tensor, x: Tensor, kind: str, warps: int = 16) -> tuple[Tensor, Tensor]:
    """The gradient by gate and up, side by side, as 8 bits and what each row of them is to be multiplied by."""
    rows, half = grad.shape
    by_x = torch.empty((rows, 2 * half), dtype=EIGHT, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if by_x.numel():
        with on_device(x):
            block = triton.next_power_of_2(half)
            args = grad.contiguous(), x.contiguous(), by_x, scale, half
            _gated_backward[(rows,)](*args, KIND=kind, BLOCK=block, num_warps=warps)
    return by_x, scale


def turned(
    bits: Tensor, factor: Tensor | None, long: int, tile: tuple[int, int] = (128, 128), warps: int = 4
) -> Tensor:
    """The transpose of 8-bit rows, each multiplied by its factor, with zeros up to `long` columns."""
    rows, columns = bits.shape
    y = torch.empty((columns, long), dtype=EIGHT, device=bits.device)
    if y.numel():
        with on_device(bits):
            grid = triton.cdiv(long, tile[0]), triton.cdiv(columns, tile[1])
            given = bits.contiguous(), None if factor is None else factor.contiguous(), y
            _turned[grid](*given, rows, columns, long, ROWS=tile[0], COLUMNS=tile[1], num_warps=warps)
    return y
