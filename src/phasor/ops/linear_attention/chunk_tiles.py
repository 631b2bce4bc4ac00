"""What the kernels of linear attention share: tiles of a chunk, and what is left of a token's writing at another."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, stride, rows, columns, offs_m, offs_n):
    """The tile `[offs_m, offs_n]` of a matrix of that many rows and columns, zero outside of it."""
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    return tl.load(ptr + offs_m[:, None] * stride + offs_n[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, stride, rows, columns, offs_m, offs_n, x):
    """Write the part of `x` that is inside of a matrix of that many rows and columns."""
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    tl.store(ptr + offs_m[:, None] * stride + offs_n[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(ptr, offs_m, tokens):
    return tl.load(ptr + offs_m, mask=offs_m < tokens, other=0.0).to(tl.float32)


@triton.jit
def split_float64(x):
    """A float64 as the sum of two float32: the difference of two such sums keeps the digits of a small one."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def running_decay(g_ptr, starts_ptr, offs_m, tokens, HAS_STARTS: tl.constexpr):
    """For each token of a chunk the sum of log decays up to it, in two parts, and the number of its document.

    Then the decay of the state before the chunk until each token, that of what each token wrote until the chunk's end,
    and that of the state over the whole chunk.
    """
    # exp is 0 from there on, also in sums with others.
    g = tl.maximum(load_gate(g_ptr, offs_m, tokens), -1000.0).to(tl.float64)
    sums = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    high, low = split_float64(sums)
    from_state = tl.exp(high)
    to_end = tl.exp(tl.minimum((total - sums).to(tl.float32), 0.0))
    kept = tl.exp(total.to(tl.float32))
    documents = tl.zeros_like(offs_m)
    if HAS_STARTS:
        begins = tl.load(starts_ptr + offs_m, mask=offs_m < tokens, other=0).to(tl.int32)
        documents = tl.cumsum(begins, 0)
        last = tl.sum(begins, 0)
        from_state = tl.where(documents == 0, from_state, 0.0)
        to_end = tl.where(documents == last, to_end, 0.0)
        kept = tl.where(last == 0, kept, 0.0)
    return high, low, documents, from_state, to_end, kept


@triton.jit
def pair_decay(high, low, documents, offs_m, HAS_STARTS: tl.constexpr):
    """What is left at the token of each row of what the token of each column wrote: nothing of later ones."""
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    visible = offs_m[:, None] >= offs_m[None, :]
    if HAS_STARTS:
        visible = visible & (documents[:, None] == documents[None, :])
    return tl.where(visible, tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit
def invert_unit_lower(a, offs_m, LOG2_CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + a)^-1` of a strictly lower triangular `a`: blocks on the diagonal, twice as large at every step.

    With X and Y the inverses of two blocks, that of both with B below the first is X, Y and `-Y B X` below. It is as
    stable as forward substitution, which the product of `I + a^(2^n)` is not: powers of `a` grow where keys repeat.
    """
    i, j = offs_m[:, None], offs_m[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, LOG2_CHUNK):
        below = tl.where((i >> level != j >> level) & (i >> (level + 1) == j >> (level + 1)), a, 0.0)
        x -= tl.dot(tl.dot(x, below, input_precision=PRECISION), x, input_precision=PRECISION)
    return x
