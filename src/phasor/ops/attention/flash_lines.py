"""A bias that is piecewise linear in the share of a distance, in tiles: most of them have one line throughout.

A share is `log2(1 + rate distance)` times what the query divides by, its inverse span. Where no knot lies between the
lowest and the highest share of a tile, one line serves it; knots in between are passed one by one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import log2


@triton.jit
def load_spans(inverse_spans_ptr, pos_ptr, start, limit, BLOCK: tl.constexpr):
    """The inverse spans of a block of queries, and the least and greatest of them and of its positions."""
    offs = tl.minimum(start + tl.arange(0, BLOCK), limit - 1)
    inverse, position = tl.load(inverse_spans_ptr + offs), tl.load(pos_ptr + offs)
    return inverse, (tl.min(inverse), tl.max(inverse), tl.min(position), tl.max(position))


@triton.jit
def load_key_range(pos_ptr, start, limit, BLOCK: tl.constexpr):
    """The least and the greatest position of a block of keys."""
    position = tl.load(pos_ptr + tl.minimum(start + tl.arange(0, BLOCK), limit - 1))
    return tl.min(position), tl.max(position)


@triton.jit
def passed_knots(knots, rate, query_range, key_range):
    """How many knots lie below all shares of a tile, and how many below some."""
    least_inverse, most_inverse, first_query, last_query = query_range
    first_key, last_key = key_range
    near = tl.maximum(tl.maximum(first_query - last_key, first_key - last_query), 0).to(tl.float32)
    far = tl.maximum(last_query - first_key, last_key - first_query).to(tl.float32)
    low, high = log2(1.0 + rate * near) * least_inverse, log2(1.0 + rate * far) * most_inverse
    return tl.sum((knots <= low).to(tl.int32)), tl.sum((knots < high).to(tl.int32))


@triton.jit
def add_lines(scores, distance, inverse_span, rate, query_range, key_range, knots, knots_ptr, lines_ptr):
    """The scores of a tile with their bias; its shares, and how many knots lie below all of these and below some."""
    first, last = passed_knots(knots, rate, query_range, key_range)
    share = log2(1.0 + rate * tl.abs(distance)) * inverse_span
    scores += tl.load(lines_ptr + 2 * first) * share + tl.load(lines_ptr + 2 * first + 1)
    if last > first:
        for knot in range(first, last):
            bend = tl.load(lines_ptr + 2 * knot + 2) - tl.load(lines_ptr + 2 * knot)
            scores += bend * tl.maximum(share - tl.load(knots_ptr + knot), 0.0)
    return scores, share, first, last


@triton.jit
def add_key_lines(scores, k_pos_ptr, start, num_keys, q_pos, inverse_span, rate, query_range, knots, knots_ptr,
                  lines_ptr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The scores of a block of queries and the keys from `start` on with their bias, and what `add_lines` gives beside
    them, after the distances.
    """
    k_pos = tl.load(k_pos_ptr + tl.minimum(start + tl.arange(0, BLOCK_N), num_keys - 1))
    distance = (q_pos - k_pos[None, :]).to(tl.float32)
    scores, share, first, last = add_lines(
        scores, distance, inverse_span, rate, query_range, (tl.min(k_pos), tl.max(k_pos)), knots, knots_ptr, lines_ptr
    )
    return scores, distance, share, first, last


@triton.jit
def add_query_lines(scores, q_pos_ptr, inverse_spans_ptr, start, num_queries, k_pos, rate, key_range, knots, knots_ptr,
                    lines_ptr, BLOCK_M: tl.constexpr):  # fmt: skip
    """The scores `[BLOCK_N, BLOCK_M]` of a block of keys and the queries from `start` on with their bias."""
    inverse_span, query_range = load_spans(inverse_spans_ptr, q_pos_ptr, start, num_queries, BLOCK_M)
    q_pos = tl.load(q_pos_ptr + tl.minimum(start + tl.arange(0, BLOCK_M), num_queries - 1))
    distance = (q_pos[None, :] - k_pos[:, None]).to(tl.float32)
    scores, _, _, _ = add_lines(
        scores, distance, inverse_span[None, :], rate, query_range, key_range, knots, knots_ptr, lines_ptr
    )
    return scores


@triton.jit
def add_to_line(dlines_ptr, line, of_slope, of_offset):
    """Add sums over rows to the gradient of a line, which this program alone writes."""
    tl.atomic_add(dlines_ptr + 2 * line, tl.sum(of_slope), sem="relaxed")
    tl.atomic_add(dlines_ptr + 2 * line + 1, tl.sum(of_offset), sem="relaxed")


@triton.jit
def add_line_gradients(ds, share, distance, rate, knots_ptr, lines_ptr, dlines_ptr, first, last, line, of_slope,
                       of_offset, by_share, by_rate):  # fmt: skip
    """The running sums of the gradient with those of a tile `ds`, all by row.

    `of_slope` and `of_offset` are of the `line` of the tiles before, and are stored where another one begins.
    `by_share` is the sum of slope times share, and `by_rate` that of slope times the logarithm's
    derivative by the rate.
    """
    if first != line:
        add_to_line(dlines_ptr, line, of_slope, of_offset)
        of_slope, of_offset = of_slope * 0.0, of_offset * 0.0
    slope = tl.load(lines_ptr + 2 * first)
    ds_share = ds * share
    ds_rate = ds * (tl.abs(distance) / (1.0 + rate * tl.abs(distance)))
    share_sum = tl.sum(ds_share, 1)
    of_slope += share_sum
    of_offset += tl.sum(ds, 1)
    by_share += slope * share_sum
    by_rate += slope * tl.sum(ds_rate, 1)
    if last > first:
        for knot in range(first, last):  # what lies above goes from one line to the next
            above = share > tl.load(knots_ptr + knot)
            bend = tl.load(lines_ptr + 2 * knot + 2) - tl.load(lines_ptr + 2 * knot)
            share_sum, offset_sum = tl.sum(tl.where(above, ds_share, 0.0), 1), tl.sum(tl.where(above, ds, 0.0), 1)
            by_share += bend * share_sum
            by_rate += bend * tl.sum(tl.where(above, ds_rate, 0.0), 1)
            add_to_line(dlines_ptr, knot, -share_sum, -offset_sum)
            add_to_line(dlines_ptr, knot + 1, share_sum, offset_sum)
    return first, of_slope, of_offset, by_share, by_rate
