"""Gradients of attention over intervals in Triton: one kernel goes by blocks of queries, the other by blocks of keys.

Weights are made again from the scores and the sums kept of the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.kernels.flash_tiles_triton import (
    LOG2E,
    NEVER,
    NONE,
    SLOPES,
    TABLE,
    careful_start,
    down,
    key_segments,
    load_positions,
    load_tile,
    quick_start,
    scores,
    seen_keys,
    settings,
    up,
    within,
)
from phasor.kernels.intervals import query_ranges


# fmt: off
@triton.jit
def delta_kernel(out, grad, delta, queries, heads, rows, grad_row, grad_token, grad_head,
                 WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr):  # fmt: on
    """For each query and head the product of its output and its output's gradient, `[B, H, Tq]`."""
    row = tl.program_id(0) * R + tl.arange(0, R).to(tl.int64)  # of [B, Tq, H]
    b, token, head = row // (queries * heads), row // heads % queries, row % heads
    column = tl.arange(0, D)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(out + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    at = b * grad_row + token * grad_token + head * grad_head
    y = tl.load(grad + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + (b * heads + head) * queries + token, tl.sum(x * y, 1), mask=row < rows)


# fmt: off
@triton.jit
def queries_kernel(q, k, v, grad, logsumexp, delta, q_grad, table_grad,
                   bounds, real, query_at, key_at, shifts, slopes, table,
                   queries, keys, heads, shared, lowest, entries, scale, softcap,
                   q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                   grad_row, grad_token, grad_head, bounds_row, query_at_row, key_at_row, shifts_row,
                   WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
                   SOFTCAP: tl.constexpr, LEARNED: tl.constexpr, BESIDE: tl.constexpr,
                   PADDED: tl.constexpr):  # fmt: on
    """Gradients of queries; where a table is LEARNED also every program's part of its gradient."""
    blocks = tl.cdiv(queries, M)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    head = program // blocks % heads
    b = (program // blocks // heads).to(tl.int64)
    row = block * M + tl.arange(0, M)
    there = row < queries
    shift, origin, position, slope, behind, ahead = 0, 0, row, 0.0, 0.0, 0.0
    if BIAS != NONE:
        query_at += b * query_at_row
        key_at += b * key_at_row
        origin = tl.load(query_at + block * M)
        position = load_positions(query_at, block * M, queries, origin, M, BIAS)
    if BIAS == SLOPES:
        slope = tl.load(slopes + head)
    if BIAS == TABLE:
        shift = tl.load(shifts + b * shifts_row)
        table += head * entries
        ahead, behind = tl.load(table), tl.load(table + entries - 1)
    if LEARNED:
        table_grad += tl.cast(program, tl.int64) * entries
    first, last, begin, end, quick, careful = key_segments(
        bounds + b * bounds_row, row, there, queries, keys, shift, lowest, entries, N, BIAS, BESIDE
    )
    first, last, begin, end = first[:, None], last[:, None], begin[:, None], end[:, None]
    k += b * k_row + (head // shared) * k_head
    v += b * v_row + (head // shared) * v_head
    if PADDED:
        real += b * keys
    asked = load_tile(q + b * q_row + head * q_head, block * M, q_token, queries, M, D, WIDTH, False)
    wanted = load_tile(grad + b * grad_row + head * grad_head, block * M, grad_token, queries, M, D, WIDTH, False)
    sums = tl.load(logsumexp + (b * heads + head) * queries + row, mask=there, other=float("inf"))[:, None]
    mean = tl.load(delta + (b * heads + head) * queries + row, mask=there, other=0.0)[:, None]
    change = tl.zeros([M, D], tl.float32)
    behind_grad, ahead_grad = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    for t in range(0, quick[1] + quick[3]):
        start = quick_start(t, quick, N, BIAS)
        seen = load_tile(k, start, k_token, keys, N, D, WIDTH, True)
        products = tl.dot(asked, tl.trans(seen), input_precision="ieee")
        distance, far = 0.0, 0.0
        if BIAS == SLOPES:
            distance = position[:, None] - load_positions(key_at, start, keys, origin, N, BIAS)[None, :]
        if BIAS == TABLE:
            far = tl.where(t < quick[1], behind, ahead)
        score, tangent, _ = scores(
            products, distance, slope, table, lowest, entries, far, scale, softcap, BIAS, SOFTCAP, False
        )
        weight = tl.exp2(score - sums)
        if PADDED:
            weight = tl.where(tl.load(real + start + tl.arange(0, N))[None, :] != 0, weight, 0.0)
        values = load_tile(v, start, v_token, keys, N, D, WIDTH, True)
        pull = weight * (tl.dot(wanted, tl.trans(values), input_precision="ieee") - mean)
        if LEARNED:
            pulled = tl.sum(pull, 1)
            behind_grad += tl.where(t < quick[1], pulled, 0.0)
            ahead_grad += tl.where(t < quick[1], 0.0, pulled)
        if SOFTCAP:
            pull *= 1.0 - tangent * tangent
        change = tl.dot(pull.to(seen.dtype), seen, change, input_precision="ieee")
    for t in range(0, careful[1] + careful[3] + careful[5] + careful[7]):
        start = careful_start(t, careful, N)
        column = (start + tl.arange(0, N))[None, :]
        seen = load_tile(k, start, k_token, keys, N, D, WIDTH, False)
        products = tl.dot(asked, tl.trans(seen), input_precision="ieee")
        distance = 0.0
        if BIAS != NONE:
            distance = position[:, None] - load_positions(key_at, start, keys, origin, N, BIAS)[None, :]
        score, tangent, entry = scores(
            products, distance, slope, table, lowest, entries, 0.0, scale, softcap, BIAS, SOFTCAP, True
        )
        mask = seen_keys(column, keys, first, last, begin, end, real, BESIDE, PADDED)
        weight = tl.where(mask, tl.exp2(score - sums), 0.0)
        values = load_tile(v, start, v_token, keys, N, D, WIDTH, False)
        pull = weight * (tl.dot(wanted, tl.trans(values), input_precision="ieee") - mean)
        if LEARNED:
            tl.atomic_add(table_grad + entry, pull, mask=mask & there[:, None], sem="relaxed")
        if SOFTCAP:
            pull *= 1.0 - tangent * tangent
        change = tl.dot(pull.to(seen.dtype), seen, change, input_precision="ieee")
    if LEARNED:
        tl.atomic_add(table_grad, tl.sum(ahead_grad), sem="relaxed")
        tl.atomic_add(table_grad + entries - 1, tl.sum(behind_grad), sem="relaxed")
    column = tl.arange(0, D)
    at = ((b * queries + row)[:, None] * heads + head) * WIDTH + column[None, :]
    mask = there[:, None] & (column < WIDTH)[None, :]
    tl.store(q_grad + at, (change * scale).to(q_grad.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def query_segments(ranges, low_key, high_key, queries, shift, lowest, entries,
                   M: tl.constexpr, BIAS: tl.constexpr):  # fmt: on
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


# fmt: off
@triton.jit
def keys_kernel(q, k, v, grad, logsumexp, delta, k_grad, v_grad, ranges,
                bounds, real, query_at, key_at, shifts, slopes, table,
                queries, keys, heads, shared, lowest, entries, scale, softcap,
                q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                grad_row, grad_token, grad_head, ranges_row, bounds_row, query_at_row, key_at_row, shifts_row,
                WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
                SOFTCAP: tl.constexpr, BESIDE: tl.constexpr, PADDED: tl.constexpr):  # fmt: on
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
    for t in range(0, quick_tiles * shared):
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
    for t in range(0, tiles * shared):
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


def backward(
    grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor | None, learned: bool, told: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of a LEARNED table `[distances, H]`, and of sink logits `[H]`."""
    q, k, v = told["q"], told["k"], told["v"]
    rows, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    told = told | {"logsumexp": logsumexp, "grad": grad}
    told |= {"grad_row": grad.stride(0), "grad_token": grad.stride(1), "grad_head": grad.stride(2)}
    delta = torch.empty_like(logsumexp)
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    by_queries, by_keys = settings("queries", q), settings("keys", q)
    blocks = triton.cdiv(queries, by_queries["M"])
    parts = torch.zeros(rows, heads, blocks, told["entries"] if learned else 0, device=q.device)
    ranges = query_ranges(told["bounds"], keys, by_keys["N"])
    with torch.cuda.device_of(q):
        per = max(1, 4096 // told["D"])
        delta_kernel[(triton.cdiv(rows * queries * heads, per),)](
            out, grad, delta, queries, heads, rows * queries * heads, *grad.stride()[:3], width, told["D"], per
        )
        told["delta"] = delta
        queries_kernel[(blocks * heads * rows,)](
            q_grad=q_grad, table_grad=parts, LEARNED=learned, **told, **by_queries
        )
        keys_kernel[(triton.cdiv(keys, by_keys["N"]) * groups * rows,)](
            k_grad=k_grad, v_grad=v_grad, ranges=ranges, ranges_row=0 if len(ranges) == 1 else ranges.stride(0),
            **told, **by_keys
        )
    sinks_grad = torch.zeros(0, device=q.device)
    if sinks is not None:
        weight = torch.exp2(sinks.float()[:, None] * LOG2E.value - logsumexp)
        sinks_grad = -(weight * delta).sum((0, 2))
    return q_grad, k_grad, v_grad, parts.sum((0, 2)).t(), sinks_grad
