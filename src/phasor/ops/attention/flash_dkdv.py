"""The gradients of keys and values in Triton: one program a block of keys, over all query heads that share it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import (
    NEVER,
    NONE,
    SLOPES,
    TABLE,
    careful_start,
    down,
    load_positions,
    load_tile,
    quick_start,
    scores,
    seen_keys,
    up,
    within,
)


@triton.jit
def query_segments(ranges, low_key, high_key, queries, shift, lowest, entries,
                   M: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Which queries a block of keys goes over, in multiples of M: the segments as `key_segments` gives them."""
    start, stop = tl.load(ranges), tl.load(ranges + 1)
    whole_from, whole_to = tl.load(ranges + 2), tl.load(ranges + 3)
    low = down(start, M)
    high = tl.where(stop > start, tl.maximum(up(stop, M), low), low)
    inner = within(up(whole_from, M), low, high)
    outer = within(tl.where(whole_to >= queries, up(queries, M), down(whole_to, M)), inner, high)
    ahead, near = outer, outer
    if BIAS == TABLE:
        ahead = within(down(low_key + lowest - shift + 1, M), inner, outer)
        near = within(up(high_key + lowest + entries - 1 - shift, M), ahead, outer)
        ahead = tl.where(shift == NEVER, inner, ahead)
        near = tl.where(shift == NEVER, outer, near)
    quick = (inner, (ahead - inner) // M, near, (outer - near) // M)
    careful = (low, low * 0, low, (inner - low) // M, ahead, (near - ahead) // M, outer, (high - outer) // M)
    return quick, careful


@triton.jit
def keys_kernel(q, k, v, grad, logsumexp, delta, k_grad, v_grad, ranges,
                bounds, real, query_at, key_at, shifts, slopes, table,
                queries, keys, heads, shared, lowest, entries, scale, softcap,
                q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                grad_row, grad_token, grad_head, ranges_row, bounds_row, query_at_row, key_at_row, shifts_row,
                WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
                SOFTCAP: tl.constexpr, BESIDE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Gradients of keys and values, summed over the query heads that share them."""
    blocks, groups = tl.cdiv(keys, N), heads // shared
    program = tl.program_id(0)
    block = program % blocks
    group = program // blocks % groups
    b = (program // blocks // groups).to(tl.int64)
    column = block * N + tl.arange(0, N)
    shift, origin, position = 0, 0, column
    if BIAS != NONE:
        query_at += b * query_at_row
        key_at += b * key_at_row
        origin = tl.load(key_at + block * N)
        position = load_positions(key_at, block * N, keys, origin, N, BIAS)
    if BIAS == TABLE:
        shift = tl.load(shifts + b * shifts_row)
    if PADDED:
        real += b * keys
    high_key = tl.minimum(block * N + N, keys) - 1
    quick, careful = query_segments(
        ranges + b * ranges_row + block * 4, block * N, high_key, queries, shift, lowest, entries, M, BIAS
    )
    bounds += b * bounds_row
    q += b * q_row + group * shared * q_head
    grad += b * grad_row + group * shared * grad_head
    logsumexp += (b * heads + group * shared) * queries
    delta += (b * heads + group * shared) * queries
    seen = load_tile(k + b * k_row + group * k_head, block * N, k_token, keys, N, D, WIDTH, False)
    values = load_tile(v + b * v_row + group * v_head, block * N, v_token, keys, N, D, WIDTH, False)
    key_change = tl.zeros([N, D], tl.float32)
    value_change = tl.zeros([N, D], tl.float32)
    tiles = careful[1] + careful[3] + careful[5] + careful[7]
    quick_tiles = quick[1] + quick[3]
    for t in range(quick_tiles * shared):
        head, u = t // quick_tiles, t % quick_tiles
        start = quick_start(u, quick, M, BIAS)
        row = start + tl.arange(0, M)
        asked = load_tile(q + head * q_head, start, q_token, queries, M, D, WIDTH, False)
        products = tl.dot(seen, tl.trans(asked), input_precision="ieee")
        distance, slope, far = 0.0, 0.0, 0.0
        if BIAS == SLOPES:
            slope = tl.load(slopes + group * shared + head)
            distance = load_positions(query_at, start, queries, origin, M, BIAS)[None, :] - position[:, None]
        if BIAS == TABLE:
            far = tl.load(table + (group * shared + head) * entries + tl.where(u < quick[1], 0, entries - 1))
        score, tangent, _ = scores(
            products, distance, slope, table, lowest, entries, far, scale, softcap, BIAS, SOFTCAP, False
        )
        sums = tl.load(logsumexp + head * queries + row, mask=row < queries, other=float("inf"))[None, :]
        mean = tl.load(delta + head * queries + row, mask=row < queries, other=0.0)[None, :]
        weight = tl.exp2(score - sums)
        wanted = load_tile(grad + head * grad_head, start, grad_token, queries, M, D, WIDTH, False)
        value_change = tl.dot(weight.to(wanted.dtype), wanted, value_change, input_precision="ieee")
        pull = weight * (tl.dot(values, tl.trans(wanted), input_precision="ieee") - mean)
        if SOFTCAP:
            pull *= 1.0 - tangent * tangent
        key_change = tl.dot(pull.to(asked.dtype), asked, key_change, input_precision="ieee")
    for t in range(tiles * shared):
        head, u = t // tiles, t % tiles
        start = careful_start(u, careful, M)
        row = start + tl.arange(0, M)
        asked = load_tile(q + head * q_head, start, q_token, queries, M, D, WIDTH, False)
        products = tl.dot(seen, tl.trans(asked), input_precision="ieee")
        distance, slope, entry_of = 0.0, 0.0, table
        if BIAS != NONE:
            distance = load_positions(query_at, start, queries, origin, M, BIAS)[None, :] - position[:, None]
        if BIAS == SLOPES:
            slope = tl.load(slopes + group * shared + head)
        if BIAS == TABLE:
            entry_of = table + (group * shared + head) * entries
        score, tangent, _ = scores(
            products, distance, slope, entry_of, lowest, entries, 0.0, scale, softcap, BIAS, SOFTCAP, True
        )
        there = row < queries
        first = tl.load(bounds + row, mask=there, other=0)[None, :]
        last = tl.load(bounds + queries + row, mask=there, other=-1)[None, :]
        begin, end = first, last
        if BESIDE:
            begin = tl.load(bounds + 2 * queries + row, mask=there, other=0)[None, :]
            end = tl.load(bounds + 3 * queries + row, mask=there, other=-1)[None, :]
        mask = seen_keys(column[:, None], keys, first, last, begin, end, real, BESIDE, PADDED)
        sums = tl.load(logsumexp + head * queries + row, mask=there, other=float("inf"))[None, :]
        mean = tl.load(delta + head * queries + row, mask=there, other=0.0)[None, :]
        weight = tl.where(mask, tl.exp2(score - sums), 0.0)
        wanted = load_tile(grad + head * grad_head, start, grad_token, queries, M, D, WIDTH, False)
        value_change = tl.dot(weight.to(wanted.dtype), wanted, value_change, input_precision="ieee")
        pull = weight * (tl.dot(values, tl.trans(wanted), input_precision="ieee") - mean)
        if SOFTCAP:
            pull *= 1.0 - tangent * tangent
        key_change = tl.dot(pull.to(asked.dtype), asked, key_change, input_precision="ieee")
    feature = tl.arange(0, D)
    at = ((b * keys + column)[:, None] * groups + group) * WIDTH + feature[None, :]
    mask = (column < keys)[:, None] & (feature < WIDTH)[None, :]
    if PADDED:  # the quick way goes over padding too: nobody sees it
        mask_real = (tl.load(real + column, mask=column < keys, other=0) != 0)[:, None]
        key_change = tl.where(mask_real, key_change, 0.0)
        value_change = tl.where(mask_real, value_change, 0.0)
    tl.store(k_grad + at, (key_change * scale).to(k_grad.dtype.element_ty), mask=mask)
    tl.store(v_grad + at, value_change.to(v_grad.dtype.element_ty), mask=mask)
