"""A few rows times a weight matrix, bound by reading it: the part that all projections of a decoding step share.

One row is multiplied element by element (GEMV), several rows by `tl.dot`. The RMS norm before a projection needs no
separate pass: its weights multiply the row, and the mean square, summed along the way, divides the result. Int8
weights are multiplied as integers, and the result by the scale of its output. For int4 weights see `int4_tiles.py`.

With USE_PDL a kernel begins while the one before it ends: it loads its first weights, which no kernel writes, and only
then waits for the results of the other. What it needs of them is loaded at once, a residual too, which comes last.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.decode.int4_tiles import SHARE, int4_tile, load_scales, multiply_word, split_words
from phasor.ops.pdl import pdl_wait


@triton.jit
def load_weights(weight_ptrs, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of weights: some outputs, and the inputs from `start` on."""
    offs_k = start + tl.arange(0, BLOCK_K)[None, :]
    if start + BLOCK_K <= K:
        w = tl.load(weight_ptrs + offs_k, eviction_policy="evict_first")
    else:
        w = tl.load(weight_ptrs + offs_k, mask=offs_k < K, other=0, eviction_policy="evict_first")
    return w


@triton.jit
def weights_to_float32(w, INTEGER_ASM: tl.constexpr):
    """Weights in float32; with INTEGER_ASM, int8 weights are converted in the fastest way of an NVIDIA GPU.

    Its conversions are slower than memory. So each byte, made positive, is put into the lowest bits of 2^23, four of
    them at a time, and 2^23 is subtracted again.
    """
    if INTEGER_ASM:
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
def load_features(x_ptr, offs_k, K):
    """Elements of one row, in float32."""
    return tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)


@triton.jit
def load_norm_weight(norm_ptr, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm's weights of a tile of inputs; 0 without a norm. Not converted, which would wait for them."""
    weight = tl.zeros([BLOCK_K], tl.float32)
    if norm_ptr is not None:
        offs_k = start + tl.arange(0, BLOCK_K)
        weight = tl.load(norm_ptr + offs_k, mask=offs_k < K, other=0.0)
    return weight


@triton.jit
def wait_and_load(ptrs, mask, USE_PDL: tl.constexpr):
    """Wait for the kernel before, then start loading; float32, and nothing where `ptrs` is None."""
    pdl_wait(USE_PDL)
    loaded = 0.0
    if ptrs is not None:
        loaded = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def apply_norm_weight(x, norm_ptr, norm_offset, sum_squares, offs_k, K: tl.constexpr):
    """Elements times the norm's weights if there is a norm, and the running sum of their squares."""
    if norm_ptr is not None:
        sum_squares += x * x
        x *= norm_offset + load_features(norm_ptr, offs_k, K)
    return x, sum_squares


@triton.jit
def small_gemm(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptr, scale_ptr, offs_n, M, residual_ptrs, residual_mask,
    BLOCK_M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr, INTEGER_ASM: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """`norm(x) W^T` for rows `x [M, K]` and the outputs `offs_n [BLOCK_N]`; float32 `[BLOCK_M, BLOCK_N]`.

    `norm_ptr` is None without a norm. `scale_ptr` has one scale per output of int8 weights, one per SCALE_GROUP inputs
    of int4 weights, and is None for others; SCALE_GROUP is 0 for all but int4. Int4 weights are words of eight for one
    row, and bytes of two for more. The second result is what `residual_ptrs` point to, if they are not None.
    """
    PACKING: tl.constexpr = (8 if BLOCK_M == 1 else 2) if SCALE_GROUP else 1
    weight_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * (K // PACKING)
    if SCALE_GROUP:
        scale_ptrs = scale_ptr + offs_n.to(tl.int64)[:, None] * (K // SCALE_GROUP)
    if BLOCK_M == 1 and scale_ptr is None:
        partial = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        sum_squares = tl.zeros([BLOCK_K], tl.float32)
        w = load_weights(weight_ptrs, 0, K, BLOCK_K)
        norm_weight = load_norm_weight(norm_ptr, 0, K, BLOCK_K)
        residual = wait_and_load(residual_ptrs, residual_mask, USE_PDL)
        for start in tl.static_range(0, K, BLOCK_K):
            x = load_features(x_ptr, start + tl.arange(0, BLOCK_K), K)
            if start + BLOCK_K < K:
                prefetched = load_weights(weight_ptrs, start + BLOCK_K, K, BLOCK_K)
                norm_prefetched = load_norm_weight(norm_ptr, start + BLOCK_K, K, BLOCK_K)
            if norm_ptr is not None:
                sum_squares += x * x
                x *= norm_offset + norm_weight.to(tl.float32)
            partial += w.to(tl.float32) * x[None, :]
            if start + BLOCK_K < K:
                w = prefetched
                norm_weight = norm_prefetched
        acc = tl.sum(partial, axis=1)[None, :]
        if norm_ptr is not None:
            acc *= tl.rsqrt(tl.sum(sum_squares, axis=0) / K + eps)
    elif BLOCK_M == 1 and SCALE_GROUP:  # a thread has 32 neighboring weights, and takes the elements of `x` by eights
        SHARES: tl.constexpr = BLOCK_K // SHARE
        partial = tl.zeros([BLOCK_N, SHARES], tl.float32)
        sum_squares = tl.zeros([SHARES, 8], tl.float32)
        w = load_weights(weight_ptrs, 0, K // 8, BLOCK_K // 8)
        scale = load_scales(scale_ptrs, 0, K, SHARES, SCALE_GROUP)
        residual = wait_and_load(residual_ptrs, residual_mask, USE_PDL)
        for start in tl.static_range(0, K, BLOCK_K):
            if start + BLOCK_K < K:
                prefetched = load_weights(weight_ptrs, (start + BLOCK_K) // 8, K // 8, BLOCK_K // 8)
                scale_prefetched = load_scales(scale_ptrs, start + BLOCK_K, K, SHARES, SCALE_GROUP)
            words = split_words(w, BLOCK_N, SHARES)
            share = tl.zeros([BLOCK_N, SHARES], tl.float32)
            for word in tl.static_range(4):
                offs_k = start + 8 * word + tl.arange(0, SHARES)[:, None] * SHARE + tl.arange(0, 8)[None, :]
                x = load_features(x_ptr, offs_k, K)
                x, sum_squares = apply_norm_weight(x, norm_ptr, norm_offset, sum_squares, offs_k, K)
                share = multiply_word(share, words[word], x, SHARES, INTEGER_ASM)
            partial += share * scale.to(tl.float32)
            if start + BLOCK_K < K:
                w = prefetched
                scale = scale_prefetched
        acc = tl.sum(partial, axis=1)[None, :]
        if norm_ptr is not None:
            acc *= tl.rsqrt(tl.sum(tl.sum(sum_squares, axis=1), axis=0) / K + eps)
    elif BLOCK_M == 1:  # a thread has 16 neighboring weights, and takes the elements of `x` by eights, as it loads them
        partial = tl.zeros([BLOCK_N, BLOCK_K // 16], tl.float32)
        sum_squares = tl.zeros([BLOCK_K // 16, 8], tl.float32)
        w = load_weights(weight_ptrs, 0, K, BLOCK_K)
        residual = wait_and_load(residual_ptrs, residual_mask, USE_PDL)
        for start in tl.static_range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
            if start + BLOCK_K < K:
                prefetched = load_weights(weight_ptrs, start + BLOCK_K, K, BLOCK_K)
            wide = tl.reshape(weights_to_float32(w, INTEGER_ASM), [BLOCK_N, BLOCK_K // 16, 2, 8])
            first, second = tl.split(tl.permute(wide, [0, 1, 3, 2]))
            x = load_features(x_ptr, offs_k, K)
            x, sum_squares = apply_norm_weight(x, norm_ptr, norm_offset, sum_squares, offs_k, K)
            partial += tl.sum(first * x[None, :, :], axis=2)
            x = load_features(x_ptr, offs_k + 8, K)
            x, sum_squares = apply_norm_weight(x, norm_ptr, norm_offset, sum_squares, offs_k + 8, K)
            partial += tl.sum(second * x[None, :, :], axis=2)
            if start + BLOCK_K < K:
                w = prefetched
        acc = tl.sum(partial, axis=1)[None, :]
        if norm_ptr is not None:
            acc *= tl.rsqrt(tl.sum(tl.sum(sum_squares, axis=1), axis=0) / K + eps)
    else:
        offs_m = tl.arange(0, BLOCK_M)[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sum_squares = tl.zeros([BLOCK_M], tl.float32)
        residual = wait_and_load(residual_ptrs, residual_mask, USE_PDL)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            offs_k = start + tl.arange(0, BLOCK_K)[None, :]
            offs_w = start // PACKING + tl.arange(0, BLOCK_K // PACKING)[None, :]
            w = tl.load(weight_ptrs + offs_w, mask=offs_w < K // PACKING, other=0, eviction_policy="evict_first")
            x = tl.load(x_ptr + offs_m * K + offs_k, mask=(offs_m < M) & (offs_k < K), other=0.0)
            if norm_ptr is not None:
                wide = x.to(tl.float32)
                sum_squares += tl.sum(wide * wide, axis=1)
                norm_weight = tl.load(norm_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
                x = (wide * (norm_offset + norm_weight)).to(x_ptr.dtype.element_ty)
            if SCALE_GROUP:
                w = int4_tile(w, scale_ptrs, start, K, BLOCK_N, BLOCK_K, SCALE_GROUP).to(x_ptr.dtype.element_ty)
            elif scale_ptr is not None:
                w = weights_to_float32(w, INTEGER_ASM).to(x_ptr.dtype.element_ty)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if norm_ptr is not None:
            acc *= tl.rsqrt(sum_squares / K + eps)[:, None]
    if scale_ptr is not None and SCALE_GROUP == 0:
        acc *= tl.load(scale_ptr + offs_n)[None, :]
    return acc, residual
