"""A few rows times a weight matrix, bound by reading it: what the projections of a step have in common.

One row is multiplied feature by feature, and a few rows as a matrix. The norm before a projection needs no pass of its
own: its weights multiply the row, and its size is found along the way and divides the result. Weights in 8 bits are
multiplied as the whole numbers they are, and the result by the scale of its output.

Under `USE_PDL` a kernel begins while the one before it ends: it asks for its first weights, which nobody writes, and
waits for the other's results only then.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.pdl import pdl_wait


@triton.jit
def tile(lines, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights of some outputs, for the inputs from `start` on."""
    at = start + tl.arange(0, BLOCK_K)[None, :]
    if start + BLOCK_K <= K:
        w = tl.load(lines + at, eviction_policy="evict_first")
    else:
        w = tl.load(lines + at, mask=at < K, other=0, eviction_policy="evict_first")
    return w


@triton.jit
def numbers(w, BYTES: tl.constexpr):
    """Weights in float32. Under `BYTES` whole numbers become floats in the quickest way an NVIDIA GPU has.

    Its conversions are slower than memory. So each byte, made positive, is put into the lowest bits of 2^23, four of
    them at a time, and 2^23 is taken off again.
    """
    if BYTES:
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7440;
            prmt.b32 $1, t, 0x4B000000, 0x7441;
            prmt.b32 $2, t, 0x4B000000, 0x7442;
            prmt.b32 $3, t, 0x4B000000, 0x7443;
            }
            """,
            "=r,=r,=r,=r,r",
            [w],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        wide -= 8388736.0  # 2^23 + 128
    else:
        wide = w.to(tl.float32)
    return wide


@triton.jit
def features(x, at, K: tl.constexpr):
    """Features of one row."""
    return tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def weighted(xs, norm, offset, squares, at, K: tl.constexpr):
    """Features times the norm's weights where there is one; and the sum of their squares."""
    if norm is not None:
        squares += xs * xs
        xs *= offset + features(norm, at, K)
    return xs, squares


@triton.jit
def product(
    x, norm, offset, eps, weight, scale, outputs, rows,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The `N` outputs of `M` rows `x [rows, K]`, normed first where there is a norm; float32 `[M, N]`.

    `scale` has a number for every output where the weights are whole numbers of 8 bits, and is None where they are not.
    """
    lines = weight + outputs.to(tl.int64)[:, None] * K
    if M == 1 and scale is None:
        sums = tl.zeros([N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        w = tile(lines, 0, K, BLOCK_K)
        pdl_wait(USE_PDL)
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            xs = features(x, at, K)
            if start + BLOCK_K < K:
                ahead = tile(lines, start + BLOCK_K, K, BLOCK_K)
            xs, squares = weighted(xs, norm, offset, squares, at, K)
            sums += w.to(tl.float32) * xs[None, :]
            if start + BLOCK_K < K:
                w = ahead
        total = tl.sum(sums, axis=1)[None, :]
        if norm is not None:
            total *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    elif M == 1:  # 16 neighbors are one thread's, which takes those of `x` by eights, as it reads them
        sums = tl.zeros([N, BLOCK_K // 16], tl.float32)
        squares = tl.zeros([BLOCK_K // 16, 8], tl.float32)
        w = tile(lines, 0, K, BLOCK_K)
        pdl_wait(USE_PDL)
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
            if start + BLOCK_K < K:
                ahead = tile(lines, start + BLOCK_K, K, BLOCK_K)
            wide = tl.reshape(numbers(w, BYTES), [N, BLOCK_K // 16, 2, 8])
            first, second = tl.split(tl.permute(wide, [0, 1, 3, 2]))
            xs, squares = weighted(features(x, at, K), norm, offset, squares, at, K)
            sums += tl.sum(first * xs[None, :, :], axis=2)
            xs, squares = weighted(features(x, at + 8, K), norm, offset, squares, at + 8, K)
            sums += tl.sum(second * xs[None, :, :], axis=2)
            if start + BLOCK_K < K:
                w = ahead
        total = tl.sum(sums, axis=1)[None, :]
        if norm is not None:
            total *= tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    else:
        row = tl.arange(0, M)[:, None]
        total = tl.zeros([M, N], tl.float32)
        squares = tl.zeros([M], tl.float32)
        pdl_wait(USE_PDL)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + tl.arange(0, BLOCK_K)[None, :]
            w = tl.load(lines + at, mask=at < K, other=0, eviction_policy="evict_first")
            xs = tl.load(x + row * K + at, mask=(row < rows) & (at < K), other=0.0)
            if norm is not None:
                wide = xs.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                scaled = wide * (offset + tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32))
                xs = scaled.to(x.dtype.element_ty)
            if scale is not None:
                w = numbers(w, BYTES).to(x.dtype.element_ty)
            total = tl.dot(xs, tl.trans(w), total, input_precision="ieee")
        if norm is not None:
            total *= tl.rsqrt(squares / K + eps)[:, None]
    if scale is not None:
        total *= tl.load(scale + outputs)[None, :]
    return total
