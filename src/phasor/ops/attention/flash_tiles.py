"""What the kernels of attention over key intervals share: tile sizes, scores, and the keys a block visits."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from phasor.ops.attention import intervals
from phasor.ops.launch import next_power_of_2

# Kinds of bias: none, a table by distance, lines (`flash_lines.py`), slopes times a curve of the distance, or times a
# difference of sums.
NO_BIAS, TABLE, LINES, LINEAR, LOG, POWER, SUMS = (tl.constexpr(kind) for kind in range(7))
NON_CONTIGUOUS = tl.constexpr(intervals.NON_CONTIGUOUS)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which knows no functions of a device
HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """The queries and keys of a tile, and the launch options that go with them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kernel and bytes per element, then by the features of a head, a power of two.
TILINGS = {
    ("forward", 2): {64: Tiling(64, 64, 4, 3), 128: Tiling(64, 64, 4, 3), 256: Tiling(64, 32, 4, 3)},
    ("forward", 4): {64: Tiling(64, 32, 8, 2), 128: Tiling(32, 32, 8, 2), 256: Tiling(32, 32, 8, 1)},
    ("dq", 2): {64: Tiling(64, 64, 4, 2), 128: Tiling(128, 64, 8, 3), 256: Tiling(64, 32, 8, 2)},
    ("dq", 4): {64: Tiling(32, 32, 8, 2), 128: Tiling(32, 16, 8, 1), 256: Tiling(32, 16, 8, 1)},
    ("dkdv", 2): {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 128, 8, 3), 256: Tiling(32, 64, 8, 1)},
    ("dkdv", 4): {64: Tiling(32, 32, 8, 2), 128: Tiling(16, 32, 8, 1), 256: Tiling(16, 16, 8, 1)},
}


def tiling(kernel: str, q: Tensor) -> Tiling:
    """The tiling of the `"forward"`, `"dq"` or `"dkdv"` kernel."""
    return TILINGS[kernel, q.element_size()][max(64, block_d(q.shape[-1]))]


def block_d(head_dim: int) -> int:
    """The features of a head as a tile has them: a power of two."""
    return max(16, next_power_of_2(head_dim))


@triton.jit
def load_tile(ptr, start, stride, limit, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
              IN_RANGE: tl.constexpr):  # fmt: skip
    """`[BLOCK, BLOCK_D]` from row `start` on; zeros past `limit` rows, unless all are IN_RANGE, and past HEAD_DIM."""
    offs_m, offs_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    ptrs = ptr + tl.cast(start, tl.int64) * stride + offs_m[:, None] * stride + offs_d[None, :]
    if IN_RANGE and BLOCK_D == HEAD_DIM:
        return tl.load(ptrs)
    elif IN_RANGE:
        return tl.load(ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptrs, mask=(start + offs_m < limit)[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def load_positions(ptr, start, limit, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Positions, int64 and twice; or sums, which are given as pairs: each a float and the rest that it rounds away."""
    offs = start + tl.arange(0, BLOCK)
    high = tl.load(ptr + offs, mask=offs < limit, other=0)
    low = high
    if BIAS == SUMS:
        low = tl.load(ptr + limit + offs, mask=offs < limit, other=0)
    return high, low


@triton.jit
def distances(query_high, query_low, key_high, key_low, BIAS: tl.constexpr):
    """Queries minus keys, rounded once: as float32, or for a table as integers."""
    if BIAS == SUMS:
        return (query_high - key_high) + (query_low - key_low)
    elif BIAS == TABLE:
        return query_high - key_high
    else:
        return (query_high - key_high).to(tl.float32)


@triton.jit
def table_entries(distance, min_distance, num_distances):
    """Where a table has the bias of each distance, int32."""
    return clamp(distance - min_distance, 0, num_distances - 1).to(tl.int32)


@triton.jit
def load_place(sums_ptr, offset, limit, BIAS: tl.constexpr):
    """The sum at an offset, as a pair."""
    high, low = 0.0, 0.0
    if BIAS == SUMS:
        high, low = tl.load(sums_ptr + offset), tl.load(sums_ptr + limit + offset)
    return high, low


@triton.jit
def query_part(q_high, q_low, q_index, high, low, place, shift, slope, BIAS: tl.constexpr):
    """The bias between a place, given by its sum and its index, and queries that do not come before it.

    With `key_part` it is all of the bias, where positions are contiguous; else that is added as a whole.
    """
    if BIAS == SUMS:
        part = slope * distances(q_high, q_low, high, low, BIAS)
    else:
        part = tl.where(shift == NON_CONTIGUOUS, 0.0, slope * (place - q_index).to(tl.float32))
    return part


@triton.jit
def key_part(k_high, k_low, k_index, high, low, place, slope, BIAS: tl.constexpr):
    """The bias between keys and a place, given by its sum and its index, that does not come before them."""
    return slope * (distances(high, low, k_high, k_low, BIAS) if BIAS == SUMS else (k_index - place).to(tl.float32))


@triton.jit
def add_key_bias(scores, k_pos_ptr, row_ptrs, start, num_keys, q_high, q_low, offs_m, shift, slope, curve_param,
                 high, low, place, min_distance, num_distances, BLOCK_N: tl.constexpr, BIAS: tl.constexpr,
                 ONE_SIDED: tl.constexpr, TWO_INTERVALS: tl.constexpr):  # fmt: skip
    """Scores of a block of queries and the keys from `start` on with their bias, and the distances or table's entries.

    By index, without a look at positions, where those are contiguous; a second interval of keys never is. ONE_SIDED
    where no key comes after a place that does not come after any query: then only the `key_part` is added.
    """
    offs_n = tl.arange(0, BLOCK_N)
    if BIAS == SUMS or TWO_INTERVALS or shift == NON_CONTIGUOUS:
        k_high, k_low = load_positions(k_pos_ptr, start, num_keys, BLOCK_N, BIAS)
        distance = distances(q_high, q_low, k_high[None, :], k_low[None, :], BIAS)
        scores, distance = add_bias(scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS)
    else:
        first = offs_m + shift - start
        if ONE_SIDED:
            distance = scores
            scores += key_part(offs_n, offs_n, start + offs_n, high, low, place, slope, BIAS)[None, :]
        elif BIAS == TABLE:
            scores, distance = add_bias(
                scores, first[:, None] - offs_n[None, :], row_ptrs, slope, curve_param, min_distance, num_distances,
                BIAS,
            )  # fmt: skip
        else:
            distance = first.to(tl.float32)[:, None] - offs_n.to(tl.float32)[None, :]
            scores, distance = add_bias(
                scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS
            )  # fmt: skip
    return scores, distance


@triton.jit
def add_query_bias(scores, q_pos_ptr, row_ptrs, start, num_queries, k_high, k_low, offs_n, shift, slope,
                   curve_param, high, low, place, min_distance, num_distances, BLOCK_M: tl.constexpr,
                   BIAS: tl.constexpr, ONE_SIDED: tl.constexpr, TWO_INTERVALS: tl.constexpr):  # fmt: skip
    """As `add_key_bias`, of the queries from `start` on and a block of keys `[BLOCK_N, BLOCK_M]`; and ONE_SIDED the
    `query_part` that is not added, else 0.
    """
    offs_m = tl.arange(0, BLOCK_M)
    part = tl.zeros([BLOCK_M], tl.float32)
    if BIAS == SUMS or TWO_INTERVALS or shift == NON_CONTIGUOUS:
        q_high, q_low = load_positions(q_pos_ptr, start, num_queries, BLOCK_M, BIAS)
        if ONE_SIDED and BIAS == SUMS:
            distance = offs_m.to(tl.float32)[None, :]
            scores += key_part(k_high, k_low, offs_n, high, low, place, slope, BIAS)[:, None]
            part = query_part(q_high, q_low, offs_m, high, low, place, shift, slope, BIAS)
        else:
            distance = distances(q_high[None, :], q_low[None, :], k_high[:, None], k_low[:, None], BIAS)
            scores, distance = add_bias(
                scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS
            )  # fmt: skip
    else:
        first = start + shift - offs_n
        if ONE_SIDED:
            distance = scores
            scores += key_part(k_high, k_low, offs_n, high, low, place, slope, BIAS)[:, None]
            part = query_part(offs_m, offs_m, start + offs_m + shift, high, low, place, shift, slope, BIAS)
        elif BIAS == TABLE:
            scores, distance = add_bias(
                scores, first[:, None] + offs_m[None, :], row_ptrs, slope, curve_param, min_distance, num_distances,
                BIAS,
            )  # fmt: skip
        else:
            distance = first.to(tl.float32)[:, None] + offs_m.to(tl.float32)[None, :]
            scores, distance = add_bias(
                scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS
            )  # fmt: skip
    return scores, distance, part


@triton.jit
def add_bias(scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS: tl.constexpr):
    """Scores with their bias, and the distances, of a table its entries."""
    if BIAS == TABLE:
        distance = table_entries(distance, min_distance, num_distances)
        scores += tl.load(row_ptrs + distance)
    else:
        scores -= slope * curve(distance, curve_param, BIAS)
    return scores, distance


@triton.jit
def sign(x):
    """1, 0 or -1."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def query_block(num_queries, num_heads, BLOCK_M: tl.constexpr):
    """The block of queries of this program, its head and row of the batch, and the offsets of its queries.

    The last blocks, which have most to do, come first.
    """
    blocks = tl.cdiv(num_queries, BLOCK_M)
    pid = tl.program_id(0)
    block_id = blocks - 1 - pid % blocks
    head = pid // blocks % num_heads
    batch = (pid // blocks // num_heads).to(tl.int64)
    return block_id, head, batch, block_id * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def load_slope(slopes_ptr, curve_params_ptr, head, BIAS: tl.constexpr):
    """The slope of a head, to base 2 as its curve may be already, and the parameter of that, a rate or a power."""
    slope, curve_param = 0.0, 0.0
    if BIAS >= LINEAR:
        slope = tl.load(slopes_ptr + head)
        if BIAS != LOG:
            slope *= LOG2E
    if BIAS > TABLE and BIAS != LINEAR and BIAS != SUMS:
        curve_param = tl.load(curve_params_ptr + head)
    return slope, curve_param


@triton.jit
def log2(x):
    """The logarithm to base 2, off by 2^-22 at most: one instruction, where `tl.log2` is a polynomial."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def curve(distance, curve_param, BIAS: tl.constexpr):
    """What the slope multiplies: the distance to either side, `log2(1 + curve_param d)` or `d^curve_param`."""
    far = tl.abs(distance)
    if BIAS == LOG:
        far = log2(1.0 + curve_param * far)
    if BIAS == POWER:
        far = tl.where(far > 0.0, tl.exp2(curve_param * log2(tl.maximum(far, 1.0))), 0.0)
    return far


@triton.jit
def curve_derivative(distance, curve_param, BIAS: tl.constexpr):
    """The derivative of the curve by its parameter."""
    far, grad = tl.abs(distance), distance * 0.0
    if BIAS == LOG:
        grad = far / (1.0 + curve_param * far)
    if BIAS == POWER:  # 0 at the distances 0 and 1
        log = log2(tl.maximum(far, 1.0))
        grad = tl.exp2(curve_param * log) * (log / LOG2E)
    return grad


@triton.jit
def table_rows(table_ptr, batch, head, offs_m, num_queries, num_heads, num_distances, USE_ROWS: tl.constexpr):
    """Pointers to the entries for each of some queries: those of the head, and with USE_ROWS the query's own."""
    if USE_ROWS:
        row = (batch * num_heads + head) * num_queries + tl.minimum(offs_m, num_queries - 1)
        return table_ptr + row * num_distances
    else:
        return table_ptr + head * num_distances


@triton.jit
def query_bias(q_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr, row_ptrs, head, start, offs_m, num_queries,
               num_distances, BLOCK_M: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """What the bias of a block of queries needs, from pointers to its row of the batch and to its rows of a table.

    Its positions, as `load_positions` gives them; the slope and the parameter of its curve; the shift between positions
    and offsets; and the entries of the table for keys that are far ahead and far behind.
    """
    q_high, q_low, shift, bias_ahead, bias_behind = offs_m, offs_m, 0, 0.0, 0.0
    if BIAS != NO_BIAS:
        q_high, q_low = load_positions(q_pos_ptr, start, num_queries, BLOCK_M, BIAS)
    slope, curve_param = load_slope(slopes_ptr, curve_params_ptr, head, BIAS)
    if BIAS != NO_BIAS and BIAS != SUMS and BIAS != LINES:
        shift = tl.load(shifts_ptr)
    if BIAS == TABLE:
        bias_ahead, bias_behind = tl.load(row_ptrs), tl.load(row_ptrs + num_distances - 1)
    return q_high[:, None], q_low[:, None], slope, curve_param, shift, bias_ahead, bias_behind


@triton.jit
def fast_tanh(x):
    """The hyperbolic tangent by one instruction, off by 2^-11 of it at most."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def score_tile(qk, scale, softcap, HAS_SOFTCAP: tl.constexpr, DTYPE: tl.constexpr):
    """Scores to base 2 without their bias, and the tanh of a soft-cap: approximate for queries of half precision."""
    tanh = qk
    if HAS_SOFTCAP:
        if HAS_PTX and tl.float32 != DTYPE:
            tanh = fast_tanh(qk * (scale / softcap))
        else:
            tanh = 1.0 - 2.0 / (1.0 + tl.exp2(qk * (2.0 * LOG2E * scale / softcap)))
        scores = tanh * (softcap * LOG2E)
    else:
        scores = qk * (scale * LOG2E)
    return scores, tanh


@triton.jit
def visible_keys(offs_n, num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr,
                 TWO_INTERVALS: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Which keys are visible in a tile; bounds and keys are broadcast against each other."""
    visible = (offs_n >= first_key) & (offs_n <= last_key)
    if TWO_INTERVALS:
        visible |= (offs_n >= first_key2) & (offs_n <= last_key2)
    if HAS_KEY_MASK:
        visible &= tl.load(key_mask_ptr + offs_n, mask=offs_n < num_keys, other=0) != 0
    return visible & (offs_n < num_keys)


@triton.jit
def round_down(x, BLOCK: tl.constexpr):
    """The multiple of BLOCK at or below x, at least zero."""
    return tl.maximum(x, 0) // BLOCK * BLOCK


@triton.jit
def round_up(x, BLOCK: tl.constexpr):
    """The multiple of BLOCK at or above x, at least zero."""
    return (tl.maximum(x, 0) + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def clamp(x, low, high):
    """x, at least low and at most high."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def key_segments(bounds_ptr, offs_m, valid_m, num_queries, num_keys, shift, min_distance, num_distances,
                 BLOCK_N: tl.constexpr, BIAS: tl.constexpr, TWO_INTERVALS: tl.constexpr,
                 HAS_SINK_QUERIES: tl.constexpr):  # fmt: skip
    """The bounds of a block's queries, and the keys it visits, in multiples of BLOCK_N.

    There are two unmasked and four masked segments, each given by its start and its number of tiles. With
    HAS_SINK_QUERIES the tiles of the second interval are masked ones.
    """
    first_key = tl.load(bounds_ptr + offs_m, mask=valid_m, other=0)
    last_key = tl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1)
    low = round_down(tl.min(tl.where(valid_m, first_key, num_keys)), BLOCK_N)
    high = tl.maximum(round_up(tl.minimum(tl.max(last_key) + 1, num_keys), BLOCK_N), low)
    first_key2, last_key2, second, second_tiles = first_key, last_key, low, low * 0
    if TWO_INTERVALS:
        first_key2 = tl.load(bounds_ptr + 2 * num_queries + offs_m, mask=valid_m, other=0)
        last_key2 = tl.load(bounds_ptr + 3 * num_queries + offs_m, mask=valid_m, other=-1)
        second = round_down(tl.min(tl.where(valid_m, first_key2, num_keys)), BLOCK_N)
        second_end = tl.maximum(round_up(tl.minimum(tl.max(last_key2) + 1, num_keys), BLOCK_N), second)
        joined = (second_end > second) & (second_end > low) & (second < high)
        low = tl.where(joined, tl.minimum(low, second), low)
        high = tl.where(joined, tl.maximum(high, second_end), high)
        second_tiles = tl.where(joined, 0, (second_end - second) // BLOCK_N)
    inner = clamp(round_up(tl.max(tl.where(valid_m, first_key, 0)), BLOCK_N), low, high)
    if HAS_SINK_QUERIES:
        inner = clamp(tl.where(joined, tl.maximum(inner, second_end), inner), low, high)
    outer = clamp(round_down(tl.min(tl.where(valid_m, last_key, num_keys)) + 1, BLOCK_N), inner, high)
    near, ahead = outer, outer
    if BIAS == TABLE:  # between them the table is needed, outside one entry does
        max_distance = min_distance + num_distances - 1
        near = clamp(round_down(tl.min(offs_m) + shift - max_distance + 1, BLOCK_N), inner, outer)
        ahead = clamp(round_up(tl.max(offs_m) + shift - min_distance, BLOCK_N), near, outer)
        near = tl.where(shift == NON_CONTIGUOUS, inner, near)
        ahead = tl.where(shift == NON_CONTIGUOUS, outer, ahead)
    unmasked = (inner, (near - inner) // BLOCK_N, ahead, (outer - ahead) // BLOCK_N)
    masked = (second, second_tiles, low, (inner - low) // BLOCK_N, near, (ahead - near) // BLOCK_N,
              outer, (high - outer) // BLOCK_N)  # fmt: skip
    return first_key, last_key, first_key2, last_key2, unmasked, masked


@triton.jit
def unmasked_start(t, unmasked, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Where tile number `t` of the unmasked segments starts; only a table has a second one."""
    start = unmasked[0] + t * BLOCK
    if BIAS == TABLE:
        start = tl.where(t < unmasked[1], start, unmasked[2] + (t - unmasked[1]) * BLOCK)
    return start


@triton.jit
def masked_start(t, masked, BLOCK: tl.constexpr):
    """Where tile number `t` of the masked segments starts."""
    a, b, c = masked[1], masked[1] + masked[3], masked[1] + masked[3] + masked[5]
    start = tl.where(t < c, masked[4] + (t - b) * BLOCK, masked[6] + (t - c) * BLOCK)
    start = tl.where(t < b, masked[2] + (t - a) * BLOCK, start)
    return tl.where(t < a, masked[0] + t * BLOCK, start)
