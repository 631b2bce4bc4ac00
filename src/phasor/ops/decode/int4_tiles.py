"""Tiles of int4 weights: a byte has two neighbors of a row, the first in its lower half, each plus 8.

For one row of activations, a thread reads 128 bits: 32 weights, all of one scale, so that it multiplies their sum by
it. Integers become floats without conversions, which are slower than memory: the bits of an integer `i`, placed in
those of 2^23, are `2^23 + i`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

SHARE = tl.constexpr(32)  # weights of a thread; the least that share a scale


@triton.jit
def load_scales(scale_ptrs, start: tl.constexpr, K: tl.constexpr, SHARES: tl.constexpr, SCALE_GROUP: tl.constexpr):
    """The scale of every share of some outputs, from the input `start` on."""
    offs_g = (start // SHARE + tl.arange(0, SHARES)[None, :]) // (SCALE_GROUP // SHARE)
    return tl.load(scale_ptrs + offs_g, mask=offs_g < K // SCALE_GROUP, other=0.0)


@triton.jit
def split_words(w, BLOCK_N: tl.constexpr, SHARES: tl.constexpr):
    """The four words of every share: int32 `[BLOCK_N, SHARES]` each."""
    even, odd = tl.split(tl.reshape(w, [BLOCK_N, SHARES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def nibble_to_float32(w, PLACE: tl.constexpr, INTEGER_ASM: tl.constexpr):
    """Four bits of words, less 8, times 2^PLACE, which is where they are."""
    if INTEGER_ASM:  # one instruction, where the compiler of NVIDIA takes two
        args = [w, 15 << PLACE, 0x4B000000]
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", args, dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (w & (15 << PLACE)) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + 8.0 * (1 << PLACE))


@triton.jit
def multiply_nibbles(acc, w, low, high, PLACE: tl.constexpr, INTEGER_ASM: tl.constexpr):
    """Add the products of two of the eight weights of words, those in the bits from PLACE and from PLACE + 16 on.

    A weight stays where it is, and is 2^PLACE times too large; so its input is divided by that, which is exact.
    """
    acc += nibble_to_float32(w, PLACE, INTEGER_ASM) * (low / (1 << PLACE))[None, :]
    acc += nibble_to_float32(w >> 16, PLACE, INTEGER_ASM) * (high / (1 << PLACE))[None, :]
    return acc


@triton.jit
def multiply_word(acc, w, x, SHARES: tl.constexpr, INTEGER_ASM: tl.constexpr):
    """Add the products of words `[BLOCK_N, SHARES]`, eight weights each, and inputs `x [SHARES, 8]`."""
    even, odd = tl.split(tl.reshape(x, [SHARES, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    acc = multiply_nibbles(acc, w, x0, x4, 0, INTEGER_ASM)
    acc = multiply_nibbles(acc, w, x1, x5, 4, INTEGER_ASM)
    acc = multiply_nibbles(acc, w, x2, x6, 8, INTEGER_ASM)
    return multiply_nibbles(acc, w, x3, x7, 12, INTEGER_ASM)


@triton.jit
def int4_tile(
    w, scale_ptrs, start, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_GROUP: tl.constexpr
):
    """Weights `[BLOCK_N, BLOCK_K]` in float32, of bytes and scales."""
    GROUPS: tl.constexpr = BLOCK_K // SCALE_GROUP
    offs_g = start // SCALE_GROUP + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scale_ptrs + offs_g, mask=offs_g < K // SCALE_GROUP, other=0.0).to(tl.float32)
    wide = w.to(tl.int32)
    integers = tl.reshape(tl.join(wide & 15, wide >> 4), [BLOCK_N, GROUPS, SCALE_GROUP])
    floats = (integers | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2^23 + 8
    return tl.reshape(floats * scale[:, :, None], [BLOCK_N, BLOCK_K])
