"""Gated activations as Triton kernels: every element is read once, and both gradients go into one buffer."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, empty_dense, next_power_of_2


@triton.jit
def activation_and_slope(g, ACTIVATION: tl.constexpr):
    """The activation of a gate and its derivative."""
    if ACTIVATION == "reglu":
        value = tl.maximum(g, 0.0)
        slope = tl.where(g > 0.0, 1.0, 0.0)
    elif ACTIVATION == "geglu":
        phi = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        value = g * phi
        slope = phi + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif ACTIVATION == "geglu-tanh":
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        half = 1.0 / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
        value = g * half
        slope = half + 2.0 * g * half * (1.0 - half) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        value = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
        if ACTIVATION == "swiglu":
            value = g * sigmoid
            slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    return value, slope


@triton.jit
def glu_row(x_ptr, cols, D, ACTIVATION: tl.constexpr):
    """`act(gate) * up` of a row, in float32; 0 beyond its end."""
    gate = tl.load(x_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + D + cols, mask=cols < D, other=0.0).to(tl.float32)
    value, _ = activation_and_slope(gate, ACTIVATION)
    return value * up


@triton.jit
def glu_row_backward(dy_ptr, x_ptr, cols, D, ACTIVATION: tl.constexpr):
    """The gradients of gate and up of a row, and `act(gate) * up` itself, in float32; 0 beyond its end."""
    dy = tl.load(dy_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + D + cols, mask=cols < D, other=0.0).to(tl.float32)
    value, slope = activation_and_slope(gate, ACTIVATION)
    return dy * up * slope, dy * value, value * up


@triton.jit
def _glu_forward_kernel(x_ptr, y_ptr, D, ACTIVATION: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = glu_row(x_ptr + row * D * 2, cols, D, ACTIVATION)
    tl.store(y_ptr + row * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _glu_backward_kernel(dy_ptr, x_ptr, dx_ptr, y_ptr, D, ACTIVATION: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dx_ptr += row * D * 2
    dgate, dup, y = glu_row_backward(dy_ptr + row * D, x_ptr + row * D * 2, cols, D, ACTIVATION)
    tl.store(dx_ptr + cols, dgate.to(dx_ptr.dtype.element_ty), mask=cols < D)
    tl.store(dx_ptr + D + cols, dup.to(dx_ptr.dtype.element_ty), mask=cols < D)
    if y_ptr is not None:
        tl.store(y_ptr + row * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


def prepare(
    rows: int, half: int, activation: str, block_d: int, num_warps: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, rows by blocks of columns, the scalars, and the warps."""
    block_d = min(block_d, next_power_of_2(half))
    scalars = {"D": half, "ACTIVATION": activation, "BLOCK_D": block_d, "num_warps": num_warps}
    return (rows, cdiv(half, block_d)), scalars


launch_forward = KernelLauncher(_glu_forward_kernel, prepare)
launch_backward = KernelLauncher(_glu_backward_kernel, prepare)


def glu_forward(x: Tensor, activation: str, block_d: int = 2048, num_warps: int = 8) -> Tensor:
    """`act(gate) * up`."""
    half = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], half))
    if y.numel():
        tensors = {"x_ptr": x.contiguous(), "y_ptr": y}
        launch_forward(x, tensors, y.numel() // half, half, activation, block_d, num_warps)
    return y


def glu_backward(
    dy: Tensor, x: Tensor, activation: str, block_d: int = 2048, num_warps: int = 8, output: Tensor | None = None
) -> Tensor:
    """The gradients of gate and up side by side; `output`, which may be `dy` itself, receives the activation again."""
    dx = empty_dense(x)
    if dy.numel():
        half = dy.shape[-1]
        tensors = {"dy_ptr": dy.contiguous(), "x_ptr": x.contiguous(), "dx_ptr": dx, "y_ptr": output}
        launch_backward(x, tensors, dy.numel() // half, half, activation, block_d, num_warps)
    return dx
