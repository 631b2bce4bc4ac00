"""Gated activations on a GPU: every number is read once, and both halves of the gradient go into one buffer."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import on_device


@triton.jit
def activation_and_slope(g, KIND: tl.constexpr):
    """The activation and its slope."""
    if KIND == "reglu":
        value = tl.maximum(g, 0.0)
        slope = tl.where(g > 0.0, 1.0, 0.0)
    elif KIND == "geglu":
        phi = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        value = g * phi
        slope = phi + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif KIND == "geglu-tanh":
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        half = 1.0 / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
        value = g * half
        slope = half + 2.0 * g * half * (1.0 - half) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        value = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
        if KIND == "swiglu":
            value = g * sigmoid
            slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    return value, slope


@triton.jit
def glu_row(xs, at, H, KIND: tl.constexpr):
    """`act(gate) * up` of a row, in float32; 0 beyond its end."""
    gate = tl.load(xs + at, mask=at < H, other=0.0).to(tl.float32)
    up = tl.load(xs + H + at, mask=at < H, other=0.0).to(tl.float32)
    value, _ = activation_and_slope(gate, KIND)
    return value * up


@triton.jit
def glu_row_backward(grads, xs, at, H, KIND: tl.constexpr):
    """The gradients of a row by gate and by up, and `act(gate) * up` itself, in float32; 0 beyond its end."""
    grad = tl.load(grads + at, mask=at < H, other=0.0).to(tl.float32)
    gate = tl.load(xs + at, mask=at < H, other=0.0).to(tl.float32)
    up = tl.load(xs + H + at, mask=at < H, other=0.0).to(tl.float32)
    value, slope = activation_and_slope(gate, KIND)
    return grad * up * slope, grad * value, value * up


@triton.jit
def _forward(xs, ys, H, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = glu_row(xs + row * H * 2, at, H, KIND)
    tl.store(ys + row * H + at, y.to(ys.dtype.element_ty), mask=at < H)


@triton.jit
def _backward(grads, xs, by_xs, ys, H, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    by_xs += row * H * 2
    by_gate, by_up, y = glu_row_backward(grads + row * H, xs + row * H * 2, at, H, KIND)
    tl.store(by_xs + at, by_gate.to(by_xs.dtype.element_ty), mask=at < H)
    tl.store(by_xs + H + at, by_up.to(by_xs.dtype.element_ty), mask=at < H)
    if ys is not None:
        tl.store(ys + row * H + at, y.to(ys.dtype.element_ty), mask=at < H)


def forward(x: Tensor, kind: str, block: int = 2048, warps: int = 8) -> Tensor:
    """`act(gate) * up`."""
    half = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    grid, block = over(y, block)
    if y.numel():
        with on_device(x):
            _forward[grid](x.contiguous(), y, half, KIND=kind, BLOCK=block, num_warps=warps)
    return y


def backward(
    grad: Tensor, x: Tensor, kind: str, block: int = 2048, warps: int = 8, output: Tensor | None = None
) -> Tensor:
    """The gradient by gate and up, side by side; `output`, which may be `grad` itself, gets the activation again."""
    by_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, block = over(grad, block)
    if grad.numel():
        with on_device(x):
            _backward[grid](
                grad.contiguous(), x.contiguous(), by_x, output, grad.shape[-1], KIND=kind, BLOCK=block, num_warps=warps
            )
    return by_x


def over(y: Tensor, block: int) -> tuple[tuple[int, int], int]:
    """The grid of rows by blocks of columns, and how many columns a block has."""
    half = max(y.shape[-1], 1)
    block = min(block, triton.next_power_of_2(half))
    return (y.numel() // half, triton.cdiv(half, block)), block
