"""The kernels of attention over lists of key blocks: forward, merge and sum of slots, gradients of queries."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import LOG2E, load_tile
from phasor.ops.online_softmax import online_softmax


@triton.jit
def gather_tile(
    ptr, rows, stride, valid, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, IN_RANGE: tl.constexpr = False
):
    """`[BLOCK_M, BLOCK_D]` of some rows; zeros where a row is not valid, unless all are IN_RANGE, and past HEAD_DIM."""
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    if IN_RANGE and BLOCK_D == HEAD_DIM:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=valid[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_pairs(pairs_ptr, first, end, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Up to BLOCK_M pairs of a query and a slot before `end`, which of them are valid, and their queries."""
    offs = first + tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + offs, mask=offs < end, other=-1)
    return pair, pair >= 0, tl.maximum(pair, 0) // SLOTS


@triton.jit
def tile_of_program(spans_ptr, num_tiles, num_heads, stride_spans):
    """The head and row of the batch of this program, and the five bounds of its tile.

    The last tiles, which have most to do, come first.
    """
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles
    head = (pid // num_tiles % num_heads).to(tl.int64)  # times the slots of all queries it is beyond 2^31
    batch = (pid // num_tiles // num_heads).to(tl.int64)
    row = batch * num_heads + head
    spans_ptr += row * stride_spans + tile * 5
    first, last = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    return head, batch, row, first, last, tl.load(spans_ptr + 2), tl.load(spans_ptr + 3), tl.load(spans_ptr + 4)


@triton.jit
def store_pairs(out_ptr, x, pair, valid, query, stride_ot, stride_os, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                SLOTS: tl.constexpr):  # fmt: skip
    """Store a row `[BLOCK_D]` for every pair that is valid."""
    offs_d = tl.arange(0, BLOCK_D)
    offsets = query.to(tl.int64) * stride_ot + (pair - query * SLOTS) * stride_os
    in_range = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets[:, None] + offs_d[None, :], x.to(out_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def attend_to_held(q_ptr, k, v, out_ptr, lse_ptr, pairs_ptr, first, last, offs_n, num_keys, offset, factor,
                   stride_qt, stride_ot, stride_os,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
                   CAUSAL: tl.constexpr):  # fmt: skip
    """Outputs of pairs of queries and slots, tile by tile, over one block of keys and values that is loaded already."""
    for place in range(first, last, BLOCK_M):
        pair, valid, query = load_pairs(pairs_ptr, place, last, SLOTS, BLOCK_M)
        q = gather_tile(q_ptr, query, stride_qt, valid, BLOCK_D, HEAD_DIM, True)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAUSAL:  # of a block before its own a query sees all
            products = tl.where(offs_n <= tl.where(valid, query + offset, num_keys)[:, None], products, float("-inf"))
        m_i = tl.max(products, 1) * factor
        p = tl.exp2(products * factor - m_i[:, None])
        l_i = tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (1.0 / l_i)[:, None]
        store_pairs(out_ptr, acc, pair, valid, query, stride_ot, stride_os, HEAD_DIM, BLOCK_D, SLOTS)
        tl.store(lse_ptr + pair, m_i + tl.log2(l_i), mask=valid)


@triton.jit
def block_forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, pairs_ptr, spans_ptr, entries_ptr,
                         num_queries, num_keys, num_heads, group_size, num_tiles, offset, scale,
                         stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
                         stride_vh, stride_ob, stride_ot, stride_oh, stride_os,
                         stride_pairs, stride_spans, stride_entries,
                         HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
                         SLOTS: tl.constexpr):  # fmt: skip
    """As `list_forward_kernel`, causal, for tiles of one block: its keys and values are read once for all queries."""
    head, batch, row, first, last, begin, middle, end = tile_of_program(spans_ptr, num_tiles, num_heads, stride_spans)
    if end == begin:
        return
    start = tl.load(entries_ptr + row * stride_entries + begin) * BLOCK
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK, BLOCK_D, HEAD_DIM, False)
    v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK, BLOCK_D, HEAD_DIM, False)
    q_ptr += batch * stride_qb + head * stride_qh
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += row * num_queries * SLOTS
    pairs_ptr += row * stride_pairs
    offs_n = (start + tl.arange(0, BLOCK))[None, :]
    if begin == middle:
        attend_to_held(q_ptr, k, v, out_ptr, lse_ptr, pairs_ptr, first, last, offs_n, num_keys, offset, scale * LOG2E,
                       stride_qt, stride_ot, stride_os, HEAD_DIM, BLOCK_D, BLOCK_M, SLOTS, True)  # fmt: skip
    else:
        attend_to_held(q_ptr, k, v, out_ptr, lse_ptr, pairs_ptr, first, last, offs_n, num_keys, offset, scale * LOG2E,
                       stride_qt, stride_ot, stride_os, HEAD_DIM, BLOCK_D, BLOCK_M, SLOTS, False)  # fmt: skip


@triton.jit
def list_forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, pairs_ptr, spans_ptr, entries_ptr,
                        num_queries, num_keys, num_heads, group_size, num_tiles, offset, scale,
                        stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
                        stride_vh, stride_ob, stride_ot, stride_oh, stride_os,
                        stride_pairs, stride_spans, stride_entries,
                        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
                        ONE_BLOCK: tl.constexpr):  # fmt: skip
    """Outputs of every query and slot, and the logsumexp of their scores to base 2, `[B, H, Tq, SLOTS]`."""
    head, batch, row, first, last, begin, middle, end = tile_of_program(spans_ptr, num_tiles, num_heads, stride_spans)
    if end == begin:
        return
    pair, valid, query = load_pairs(pairs_ptr + row * stride_pairs, first, last, SLOTS, BLOCK_M)
    entries_ptr += row * stride_entries
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    q = gather_tile(q_ptr + batch * stride_qb + head * stride_qh, query, stride_qt, valid, BLOCK_D, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    steps: tl.constexpr = BLOCK // BLOCK_N
    only = tl.load(entries_ptr + begin) * BLOCK
    for t in range((middle - begin) * steps):
        if ONE_BLOCK:  # whose keys are read without a look into the list
            start = only + t * BLOCK_N
        else:
            start = tl.load(entries_ptr + begin + t // steps) * BLOCK + t % steps * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, False)
    index = (query + offset)[:, None]
    limit = tl.minimum(tl.max(tl.where(valid, query + offset, -1)) + 1, num_keys) if CAUSAL else num_keys
    for e in range(middle, end):
        block = tl.load(entries_ptr + e) * BLOCK
        for start in range(block, tl.minimum(block + BLOCK, limit), BLOCK_N):
            offs_n = (start + tl.arange(0, BLOCK_N))[None, :]
            k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            visible = offs_n < num_keys
            if CAUSAL:
                visible &= offs_n <= index
            v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
            acc, l_i, m_i = online_softmax(tl.where(visible, scores, float("-inf")), v, acc, l_i, m_i, True)
    acc *= (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    out_ptr += batch * stride_ob + head * stride_oh
    store_pairs(out_ptr, acc, pair, valid, query, stride_ot, stride_os, HEAD_DIM, BLOCK_D, SLOTS)
    lse = m_i + tl.log2(tl.where(l_i == 0.0, 1.0, l_i))
    tl.store(lse_ptr + row * num_queries * SLOTS + pair, lse, mask=valid)


@triton.jit
def merge_kernel(slots_ptr, slot_lse_ptr, out_ptr, lse_ptr, num_queries, num_heads, rows,
                 stride_ob, stride_ot, stride_oh,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                 SLOTS: tl.constexpr):  # fmt: skip
    """The outputs of all slots of a query, weighted by their logsumexp; slots with a logsumexp of -inf are empty."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # of [B, H, Tq]
    valid = offs_m < rows
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for s in range(SLOTS):
        top = tl.maximum(top, tl.load(slot_lse_ptr + offs_m * SLOTS + s, mask=valid, other=0.0))
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offs_d = tl.arange(0, BLOCK_D)
    in_range = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    for s in range(SLOTS):
        weight = tl.exp2(tl.load(slot_lse_ptr + offs_m * SLOTS + s, mask=valid, other=0.0) - top)
        ptrs = slots_ptr + (offs_m * SLOTS + s)[:, None] * HEAD_DIM + offs_d[None, :]
        x = tl.load(ptrs, mask=in_range & (weight > 0.0)[:, None], other=0.0)
        total += weight
        acc += weight[:, None] * x.to(tl.float32)
    batch, head, query = offs_m // (num_heads * num_queries), offs_m // num_queries % num_heads, offs_m % num_queries
    out_ptrs = out_ptr + (batch * stride_ob + head * stride_oh + query * stride_ot)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, (acc * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=in_range)
    tl.store(lse_ptr + offs_m, top + tl.log2(total), mask=valid)


@triton.jit
def sum_kernel(slots_ptr, chosen_ptr, out_ptr, num_queries, num_heads, rows, stride_ob, stride_ot, stride_oh,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
               SLOTS: tl.constexpr):  # fmt: skip
    """The sum of all slots of a query that chose a block."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # of [B, H, Tq]
    valid = offs_m < rows
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offs_d = tl.arange(0, BLOCK_D)
    in_range = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    for s in range(SLOTS):
        used = tl.load(chosen_ptr + offs_m * SLOTS + s, mask=valid, other=-1) >= 0
        ptrs = slots_ptr + (offs_m * SLOTS + s)[:, None] * HEAD_DIM + offs_d[None, :]
        acc += tl.load(ptrs, mask=in_range & used[:, None], other=0.0).to(tl.float32)
    batch, head, query = offs_m // (num_heads * num_queries), offs_m // num_queries % num_heads, offs_m % num_queries
    out_ptrs = out_ptr + (batch * stride_ob + head * stride_oh + query * stride_ot)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def list_dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, pairs_ptr, spans_ptr, entries_ptr,
                   num_queries, num_keys, num_heads, group_size, num_tiles, offset, scale,
                   stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                   stride_dob, stride_dot, stride_doh, stride_ob, stride_ot, stride_oh, stride_os,
                   stride_pairs, stride_spans, stride_entries,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
                   ONE_BLOCK: tl.constexpr):  # fmt: skip
    """Every slot's part of the gradients of queries."""
    head, batch, row, first, last, begin, middle, end = tile_of_program(spans_ptr, num_tiles, num_heads, stride_spans)
    if end == begin:
        return
    pair, valid, query = load_pairs(pairs_ptr + row * stride_pairs, first, last, SLOTS, BLOCK_M)
    entries_ptr += row * stride_entries
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    q = gather_tile(q_ptr + batch * stride_qb + head * stride_qh, query, stride_qt, valid, BLOCK_D, HEAD_DIM)
    do = gather_tile(do_ptr + batch * stride_dob + head * stride_doh, query, stride_dot, valid, BLOCK_D, HEAD_DIM)
    lse = tl.load(lse_ptr + row * num_queries + query, mask=valid, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + row * num_queries + query, mask=valid, other=0.0)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    steps: tl.constexpr = BLOCK // BLOCK_N
    only = tl.load(entries_ptr + begin) * BLOCK
    for t in range((middle - begin) * steps):
        if ONE_BLOCK:  # whose keys are read without a look into the list
            start = only + t * BLOCK_N
        else:
            start = tl.load(entries_ptr + begin + t // steps) * BLOCK + t % steps * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E) - lse)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    index = (query + offset)[:, None]
    limit = tl.minimum(tl.max(tl.where(valid, query + offset, -1)) + 1, num_keys) if CAUSAL else num_keys
    for e in range(middle, end):
        block = tl.load(entries_ptr + e) * BLOCK
        for start in range(block, tl.minimum(block + BLOCK, limit), BLOCK_N):
            offs_n = (start + tl.arange(0, BLOCK_N))[None, :]
            k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
            visible = offs_n < num_keys
            if CAUSAL:
                visible &= offs_n <= index
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            p = tl.where(visible, tl.exp2(scores - lse), 0.0)
            v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_ptr += batch * stride_ob + head * stride_oh
    store_pairs(dq_ptr, dq * scale, pair, valid, query, stride_ot, stride_os, HEAD_DIM, BLOCK_D, SLOTS)
