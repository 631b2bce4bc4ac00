"""The gradients of queries, and of a table of biases, in Triton: one program a block of queries of one head."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import (
    NONE,
    SLOPES,
    TABLE,
    careful_start,
    key_segments,
    load_positions,
    load_tile,
    quick_start,
    scores,
    seen_keys,
)


@triton.jit
def delta_kernel(out, grad, delta, queries, heads, rows, grad_row, grad_token, grad_head,
                 WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """For each query and head the product of its output and its output's gradient, `[B, H, Tq]`."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # of [B, Tq, H]
    b, token, head = row // (queries * heads), row // heads % queries, row % heads
    column = tl.arange(0, D)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(out + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    at = b * grad_row + token * grad_token + head * grad_head
    y = tl.load(grad + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + (b * heads + head) * queries + token, tl.sum(x * y, 1), mask=row < rows)


@triton.jit
def queries_kernel(q, k, v, grad, logsumexp, delta, q_grad, table_grad,
                   bounds, real, query_at, key_at, shifts, slopes, table,
                   queries, keys, heads, shared, lowest, entries, scale, softcap,
                   q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                   grad_row, grad_token, grad_head, bounds_row, query_at_row, key_at_row, shifts_row,
                   WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
                   SOFTCAP: tl.constexpr, LEARNED: tl.constexpr, BESIDE: tl.constexpr,
                   PADDED: tl.constexpr):  # fmt: skip
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
    for t in range(quick[1] + quick[3]):
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
    for t in range(careful[1] + careful[3] + careful[5] + careful[7]):
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
