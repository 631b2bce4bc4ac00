"""Projections of a few rows, bound by reading their weights: each weight is read once, and the rest is free."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.small_gemm import product
from phasor.ops.decode.tiles import Tiles, tiles_of
from phasor.ops.int8 import Int8Matrix, Matrix
from phasor.ops.pdl import pdl_launch

MOST = 16  # rows a kernel takes; of more of them a matrix multiplication makes better use
MOST_INT8 = 64  # the same in bfloat16 of weights in 8 bits, which a matrix multiplication has to convert first


class Norm(NamedTuple):
    """An RMS norm before a projection: `x / sqrt(mean(x^2) + eps) * (offset + weight)`."""

    weight: Tensor
    offset: float
    eps: float


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
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
    x, norm, offset, eps, weight, scale, bias, residual, multiplier, out, rows, features,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * (norm(x) W^T + bias)`, without the parts that are None."""
    feature = tl.program_id(0) * N + tl.arange(0, N)
    outputs = tl.minimum(feature, features - 1)
    y = product(x, norm, offset, eps, weight, scale, outputs, rows, M, K, N, BLOCK_K, STAGES, USE_PDL, BYTES)
    if bias is not None:
        y += tl.load(bias + outputs).to(tl.float32)[None, :]
    row = tl.arange(0, M)[:, None]
    to, inside = row * features + feature[None, :], (row < rows) & (feature < features)[None, :]
    if residual is not None:
        y = tl.load(residual + to, mask=inside, other=0.0).to(tl.float32) + multiplier * y
    tl.store(out + to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def feed_kernel(
    x, norm, offset, eps, weight, scale, bias, out, rows, features,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """`out = act(norm(x) W^T + bias)`; gated, of gates (the first half of W's rows) and what they let through."""
    if GATED:  # a gate beside what it gates
        pair = tl.arange(0, 2 * N)
        outputs = tl.minimum(tl.program_id(0) * N + pair // 2, features - 1) + (pair % 2) * features
        y = product(x, norm, offset, eps, weight, scale, outputs, rows, M, K, 2 * N, BLOCK_K, STAGES, USE_PDL, BYTES)
    else:
        outputs = tl.minimum(tl.program_id(0) * N + tl.arange(0, N), features - 1)
        y = product(x, norm, offset, eps, weight, scale, outputs, rows, M, K, N, BLOCK_K, STAGES, USE_PDL, BYTES)
    if bias is not None:
        y += tl.load(bias + outputs).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, [M, N, 2]))
        y = activated(gate, ACTIVATION) * up
    else:
        y = activated(y, ACTIVATION)
    row, feature = tl.arange(0, M)[:, None], tl.program_id(0) * N + tl.arange(0, N)[None, :]
    tl.store(out + row * features + feature, y.to(out.dtype.element_ty), mask=(row < rows) & (feature < features))


@triton.jit
def gate_kernel(x, out, features, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """`feed_kernel` after the multiplication: `act(x)`, or `act(gate) * up` of the two side by side."""
    feature, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = feature < features
    first = x + row * features * (2 if GATED else 1) + feature
    y = activated(tl.load(first, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(first + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * features + feature, y.to(out.dtype.element_ty), mask=inside)


class Call(NamedTuple):
    """What every projection is called with: its tiles, what comes first by place, and what is given by name."""

    tiles: Tiles
    first: list[Any]
    names: dict[str, Any]


def settings(x: Tensor, matrix: Matrix, norm: Norm | None, tiles: Tiles | None, pdl: bool, gated: bool = False) -> Call:
    """How a kernel is called for these rows and weights."""
    rows, inputs = x.shape
    weight, scale = matrix if isinstance(matrix, Int8Matrix) else (matrix, None)
    taken = tiles or tiles_of(rows, len(weight), inputs, int8=scale is not None, gated=gated)
    pdl = pdl and (rows == 1 or scale is None)  # tiles that are converted leave no room for another kernel's
    block = min(taken.inputs, max(16, triton.next_power_of_2(inputs)))
    names = {
        "M": 1 if rows == 1 else max(16, triton.next_power_of_2(rows)),
        "K": inputs,
        "N": taken.outputs,
        "BLOCK_K": block,
        "STAGES": taken.stages,
        "USE_PDL": pdl,
        "BYTES": scale is not None and x.is_cuda and torch.version.hip is None,
        "num_warps": taken.warps if scale is None else max(1, taken.warps * block // taken.inputs),
    }
    first = [x, *(norm or (None, 0.0, 0.0)), weight, scale]
    return Call(taken, first, names | pdl_launch(pdl))


def project(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`out = residual + multiplier * (norm(x) W^T + bias)` of rows `[rows, inputs]`; `out` may be the residual."""
    tiles, first, names = settings(x, matrix, norm, tiles, pdl)
    rows, features = out.shape
    grid = (triton.cdiv(features, tiles.outputs),)
    project_kernel[grid](*first, bias, residual, multiplier, out, rows, features, **names)
    return out


def feed(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    activation: str,
    *,
    gated: bool,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`out = act(norm(x) W^T + bias)`; gated, the product of the two halves, the first of them activated."""
    tiles, first, names = settings(x, matrix, norm, tiles, pdl, gated)
    rows, features = out.shape
    grid = (triton.cdiv(features, tiles.outputs),)
    feed_kernel[grid](*first, bias, out, rows, features, activation, gated, **names)
    return out


def gate(x: Tensor, out: Tensor, activation: str, *, gated: bool) -> Tensor:
    """`act(x)` into `out [rows, features]`; gated, the product of x's two halves, the first of them activated."""
    rows, features = out.shape
    gate_kernel[(triton.cdiv(features, 1024), rows)](x, out, features, activation, gated, 1024)
    return out
