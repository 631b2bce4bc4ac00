"""What the kernels of attention over intervals share: tiles, scores, and which keys a block of queries goes over."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.attention.intervals import CROOKED

NONE, SLOPES, TABLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of bias
NEVER = tl.constexpr(CROOKED)
LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """Queries and keys of a tile, and how a program goes over them."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel and bytes of a number, then by the width of a head, a power of two.
TILINGS = {
    ("forward", 2): {64: Tiling(64, 64, 4, 3), 128: Tiling(64, 64, 4, 3), 256: Tiling(64, 32, 4, 3)},
    ("forward", 4): {64: Tiling(64, 32, 8, 2), 128: Tiling(32, 32, 8, 2), 256: Tiling(32, 32, 8, 1)},
    ("queries", 2): {64: Tiling(64, 64, 4, 2), 128: Tiling(128, 64, 8, 3), 256: Tiling(64, 32, 8, 2)},
    ("queries", 4): {64: Tiling(32, 32, 8, 2), 128: Tiling(32, 16, 8, 1), 256: Tiling(32, 16, 8, 1)},
    ("keys", 2): {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 128, 8, 3), 256: Tiling(32, 64, 8, 1)},
    ("keys", 4): {64: Tiling(32, 32, 8, 2), 128: Tiling(16, 32, 8, 1), 256: Tiling(16, 16, 8, 1)},
}


def tiling(kernel: str, q: Tensor) -> Tiling:
    """The tiling of the `"forward"` kernel, or of the backward ones by `"queries"` and by `"keys"`."""
    return TILINGS[kernel, q.element_size()][max(64, width_of(q))]


def width_of(q: Tensor) -> int:
    """The features of a head as a tile has them: a power of two."""
    return max(16, int(triton.next_power_of_2(q.shape[-1])))


def settings(kernel: str, q: Tensor) -> dict[str, Any]:
    """A tiling as the arguments of a launch."""
    chosen = tiling(kernel, q)
    return {"M": chosen.queries, "N": chosen.keys, "num_warps": chosen.warps, "num_stages": chosen.stages}


@triton.jit
def load_tile(base, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr):
    """`[ROWS, D]` from row `start` on; zeros past `limit` rows, unless ALL are there, and past WIDTH features."""
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    at = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if ALL and D == WIDTH:
        return tl.load(at)
    elif ALL:
        return tl.load(at, mask=column[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(at, mask=(start + row < limit)[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def load_positions(at, start, limit, origin, COUNT: tl.constexpr, BIAS: tl.constexpr):
    """Positions counted from `origin`: as floats for slopes, as whole numbers for a table."""
    row = start + tl.arange(0, COUNT)
    position = tl.load(at + row, mask=row < limit, other=0) - origin
    if BIAS == SLOPES:
        return position.to(tl.float32)
    else:
        return position.to(tl.int32)


@triton.jit
def scores(products, distance, slope, table, lowest, entries, far, scale, softcap,
           BIAS: tl.constexpr, SOFTCAP: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Scores as powers of two, the hyperbolic tangent of a soft-cap, and where NEAR the entry in a table."""
    tangent = products
    if SOFTCAP:
        tangent = 1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * LOG2E * scale / softcap)))
        score = tangent * (softcap * LOG2E)
    else:
        score = products * (scale * LOG2E)
    entry = distance
    if BIAS == SLOPES:
        score -= slope * tl.abs(distance)
    elif BIAS == TABLE:
        if NEAR:
            entry = tl.minimum(tl.maximum(distance - lowest, 0), entries - 1)
            score += tl.load(table + entry)
        else:
            score += far
    return score, tangent, entry


@triton.jit
def seen_keys(column, keys, first, last, begin, end, real, BESIDE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Who sees whom in a tile, of bounds and of keys that are broadcast against each other."""
    seen = (column >= first) & (column <= last)
    if BESIDE:
        seen |= (column >= begin) & (column <= end)
    if PADDED:
        seen &= tl.load(real + column, mask=column < keys, other=0) != 0
    return seen & (column < keys)


@triton.jit
def down(x, N: tl.constexpr):
    """The multiple of N at or below a number, at least zero."""
    return tl.maximum(x, 0) // N * N


@triton.jit
def up(x, N: tl.constexpr):
    """The multiple of N at or above a number, at least zero."""
    return (tl.maximum(x, 0) + N - 1) // N * N


@triton.jit
def within(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def key_segments(bounds, row, there, queries, keys, shift, lowest, entries,
                 N: tl.constexpr, BIAS: tl.constexpr, BESIDE: tl.constexpr):  # fmt: skip
    """The bounds of a block's queries, and which keys it goes over, in multiples of N.

    Two segments are gone over the quick way and four carefully; of each, where it starts and how many tiles it has.
    """
    first = tl.load(bounds + row, mask=there, other=0)
    last = tl.load(bounds + queries + row, mask=there, other=-1)
    low = down(tl.min(tl.where(there, first, keys)), N)
    high = tl.maximum(up(tl.minimum(tl.max(last) + 1, keys), N), low)
    begin, end, beside, beside_tiles = first, last, low, low * 0
    if BESIDE:
        begin = tl.load(bounds + 2 * queries + row, mask=there, other=0)
        end = tl.load(bounds + 3 * queries + row, mask=there, other=-1)
        beside = down(tl.min(tl.where(there, begin, keys)), N)
        beside_to = tl.maximum(up(tl.minimum(tl.max(end) + 1, keys), N), beside)
        joined = (beside_to > beside) & (beside_to > low) & (beside < high)
        low = tl.where(joined, tl.minimum(low, beside), low)
        high = tl.where(joined, tl.maximum(high, beside_to), high)
        beside_tiles = tl.where(joined, 0, (beside_to - beside) // N)
    inner = within(up(tl.max(tl.where(there, first, 0)), N), low, high)
    outer = within(down(tl.min(tl.where(there, last, keys)) + 1, N), inner, high)
    near, ahead = outer, outer
    if BIAS == TABLE:  # between them the table is needed, outside one number does
        near = within(down(tl.min(row) + shift - (lowest + entries - 1) + 1, N), inner, outer)
        ahead = within(up(tl.max(row) + shift - lowest, N), near, outer)
        near = tl.where(shift == NEVER, inner, near)
        ahead = tl.where(shift == NEVER, outer, ahead)
    quick = (inner, (near - inner) // N, ahead, (outer - ahead) // N)
    careful = (beside, beside_tiles, low, (inner - low) // N, near, (ahead - near) // N, outer, (high - outer) // N)
    return first, last, begin, end, quick, careful


@triton.jit
def quick_start(t, quick, STEP: tl.constexpr, BIAS: tl.constexpr):
    """Where tile number `t` of the quick segments starts; only a table has a second one."""
    start = quick[0] + t * STEP
    if BIAS == TABLE:
        start = tl.where(t < quick[1], start, quick[2] + (t - quick[1]) * STEP)
    return start


@triton.jit
def careful_start(t, careful, STEP: tl.constexpr):
    """Where tile number `t` of the careful segments starts."""
    a, b, c = careful[1], careful[1] + careful[3], careful[1] + careful[3] + careful[5]
    start = tl.where(t < c, careful[4] + (t - b) * STEP, careful[6] + (t - c) * STEP)
    start = tl.where(t < b, careful[2] + (t - a) * STEP, start)
    return tl.where(t < a, careful[0] + t * STEP, start)
