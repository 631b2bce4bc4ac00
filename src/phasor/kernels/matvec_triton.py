"""Projections of a few rows, bound by reading their weights: each weight is read once, and the rest is free.

One row is multiplied feature by feature, and up to `MOST` rows as a matrix of 16. The norm before a projection needs
no pass of its own: its weights multiply the row, and its size is found along the way and divides the result.

Under `OVERLAP` a kernel begins while the one before it ends: it asks for its first weights, which nobody writes, and
waits for the other's results only then.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 16  # rows a kernel takes; of more of them a matrix multiplication makes better use


class Tiles(NamedTuple):
    """How much of a weight matrix one program reads at a time."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


VECTOR, MATRIX = Tiles(4, 1024, 4), Tiles(16, 256, 4, 4)
NARROW = Tiles(2, 1024, 4)  # a vector's, where there are so few outputs that larger tiles would leave the device idle
FEW = 2560


class Norm(NamedTuple):
    """An RMS norm before a projection: `x / sqrt(mean(x^2) + eps) * (offset + weight)`."""

    weight: Tensor
    offset: float
    eps: float


def overlaps(device: torch.device) -> bool:
    """Whether a kernel on this device may begin before the one before it has ended."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Let the next kernel begin, and wait for the results of the one before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def tile(lines, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights of some outputs, for the inputs from `start` on."""
    at = start + tl.arange(0, BLOCK_K)[None, :]
    if start + BLOCK_K <= K:
        w = tl.load(lines + at, eviction_policy="evict_first")
    else:
        w = tl.load(lines + at, mask=at < K, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def product(
    x, norm, offset, eps, weight, outputs, rows,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The `N` outputs of `M` rows `x [rows, K]`, normed first where there is a norm; float32 `[M, N]`."""
    lines = weight + outputs.to(tl.int64)[:, None] * K
    if M == 1:
        sums = tl.zeros([N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        w = tile(lines, 0, K, BLOCK_K)
        follow(OVERLAP)
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            xs = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if start + BLOCK_K < K:
                ahead = tile(lines, start + BLOCK_K, K, BLOCK_K)
            if norm is not None:
                squares += xs * xs
                xs *= offset + tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
            sums += w.to(tl.float32) * xs[None, :]
            if start + BLOCK_K < K:
                w = ahead
        total = tl.sum(sums, axis=1)[None, :]
        if norm is not None:
            total *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    else:
        row = tl.arange(0, M)[:, None]
        total = tl.zeros([M, N], tl.float32)
        squares = tl.zeros([M], tl.float32)
        follow(OVERLAP)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + tl.arange(0, BLOCK_K)[None, :]
            w = tl.load(lines + at, mask=at < K, other=0.0, eviction_policy="evict_first")
            xs = tl.load(x + row * K + at, mask=(row < rows) & (at < K), other=0.0)
            if norm is not None:
                wide = xs.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                xs = (wide * (offset + tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32))).to(w.dtype)
            total = tl.dot(xs, tl.trans(w), total, input_precision="ieee")
        if norm is not None:
            total *= tl.rsqrt(squares / K + eps)[:, None]
    return total


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
    x, norm, offset, eps, weight, bias, residual, multiplier, out, rows, features,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * (norm(x) W^T + bias)`, without the parts that are None."""
    feature = tl.program_id(0) * N + tl.arange(0, N)
    outputs = tl.minimum(feature, features - 1)
    y = product(x, norm, offset, eps, weight, outputs, rows, M, K, N, BLOCK_K, STAGES, OVERLAP)
    if bias is not None:
        y += tl.load(bias + outputs).to(tl.float32)[None, :]
    row = tl.arange(0, M)[:, None]
    to, inside = row * features + feature[None, :], (row < rows) & (feature < features)[None, :]
    if residual is not None:
        y = tl.load(residual + to, mask=inside, other=0.0).to(tl.float32) + multiplier * y
    tl.store(out + to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def feed_kernel(
    x, norm, offset, eps, weight, bias, out, rows, features,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`out = act(norm(x) W^T + bias)`; gated, of gates (the first half of W's rows) and what they let through."""
    if GATED:  # a gate beside what it gates
        pair = tl.arange(0, 2 * N)
        outputs = tl.minimum(tl.program_id(0) * N + pair // 2, features - 1) + (pair % 2) * features
        y = product(x, norm, offset, eps, weight, outputs, rows, M, K, 2 * N, BLOCK_K, STAGES, OVERLAP)
    else:
        outputs = tl.minimum(tl.program_id(0) * N + tl.arange(0, N), features - 1)
        y = product(x, norm, offset, eps, weight, outputs, rows, M, K, N, BLOCK_K, STAGES, OVERLAP)
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


def settings(
    x: Tensor, outputs: int, norm: Norm | None, tiles: Tiles | None, overlap: bool
) -> tuple[Tiles, list[Any], dict[str, Any]]:
    """The tiles, and what every projection is called with: first by place, then by name."""
    rows, inputs = x.shape
    vector = NARROW if outputs <= FEW else VECTOR
    taken = tiles or (vector if rows == 1 else MATRIX)
    names = {
        "M": 1 if rows == 1 else MOST,
        "K": inputs,
        "N": taken.outputs,
        "BLOCK_K": min(taken.inputs, max(16, triton.next_power_of_2(inputs))),
        "STAGES": taken.stages,
        "OVERLAP": overlap,
        "num_warps": taken.warps,
    }
    return taken, [x, *(norm or (None, 0.0, 0.0))], names | ({"launch_pdl": True} if overlap else {})


def project(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    tiles: Tiles | None = None,
    overlap: bool = False,
) -> Tensor:
    """`out = residual + multiplier * (norm(x) W^T + bias)` of rows `[rows, inputs]`; `out` may be the residual."""
    tiles, first, names = settings(x, len(weight), norm, tiles, overlap)
    grid = (triton.cdiv(len(weight), tiles.outputs),)
    project_kernel[grid](*first, weight, bias, residual, multiplier, out, len(x), len(weight), **names)
    return out


def feed(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    activation: str,
    *,
    gated: bool,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
    overlap: bool = False,
) -> Tensor:
    """`out = act(norm(x) W^T + bias)`; gated, the product of the two halves, the first of them activated."""
    tiles, first, names = settings(x, len(weight), norm, tiles, overlap)
    features = out.shape[1]
    grid = (triton.cdiv(features, tiles.outputs),)
    feed_kernel[grid](*first, weight, bias, out, len(x), features, activation, gated, **names)
    return out


def gate(x: Tensor, out: Tensor, activation: str, *, gated: bool) -> Tensor:
    """`act(x)` into `out [rows, features]`; gated, the product of x's two halves, the first of them activated."""
    rows, features = out.shape
    gate_kernel[(triton.cdiv(features, 1024), rows)](x, out, features, activation, gated, 1024)
    return out
