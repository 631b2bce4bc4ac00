"""Kernels of attention with a bias of counted keys: which keys are near, and the forward pass of those.

A block of queries goes from its last key to the first, with a running sum of gates for each query. Once all of them
have reached the largest count, the bias of a query is the same for all keys that are left, its far ones: attention to
those needs neither gates nor this kernel.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import (
    LOG2E,
    clamp,
    load_tile,
    query_block,
    round_down,
    round_up,
    score_tile,
    visible_keys,
)
from phasor.ops.online_softmax import online_softmax


@triton.jit
def count_kernel(q_ptr, k_ptr, table_ptr, by_row_ptr, ends_ptr, bounds_ptr, key_mask_ptr, num_queries, num_keys,
                 num_heads, group_size, num_rows, stride_row, scale, stride_qb, stride_qt, stride_qh, stride_kb,
                 stride_kt, stride_kh, stride_boundsb, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Products of queries with the rows of a table, `[B, H, Tq, stride_row]`, and where the near keys of each begin.

    The latter, `[B, H, Tq]`, is the same for the queries of a block, and a multiple of BLOCK_N.
    """
    block_id, head, batch, offs_m = query_block(num_queries, num_heads, BLOCK_M)
    valid_m, offs_n = offs_m < num_queries, tl.arange(0, BLOCK_N)
    q = load_tile(q_ptr + batch * stride_qb + head * stride_qh, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M,
                  BLOCK_D, HEAD_DIM, False)  # fmt: skip
    row = (batch * num_heads + head) * num_queries + offs_m
    row_ptrs = by_row_ptr + row[:, None] * stride_row
    for first in range(0, num_rows, BLOCK_N):
        vectors = load_tile(table_ptr, first, HEAD_DIM, num_rows, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        products = tl.dot(q, tl.trans(vectors), input_precision="ieee") * scale
        entries = (first + offs_n)[None, :]
        tl.store(row_ptrs + entries, products, mask=valid_m[:, None] & (entries < num_rows))
    bounds_ptr += batch * stride_boundsb
    first_key = tl.load(bounds_ptr + offs_m, mask=valid_m, other=num_keys)
    last_key = tl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1)
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    limit = (num_rows - 1).to(tl.float32)
    counts = tl.zeros([BLOCK_M], tl.float32)
    low = tl.min(first_key)
    start = round_up(tl.minimum(tl.max(last_key) + 1, num_keys), BLOCK_N)
    while (start > low) & (tl.min(tl.where(first_key < start, counts, limit)) < limit):
        start -= BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key[:, None], last_key[:, None], 0, 0, key_mask_ptr, False,
            HAS_KEY_MASK,
        )  # fmt: skip
        counts += tl.sum(gate(qk, scale, visible), 1)
    tl.store(ends_ptr + row, tl.zeros([BLOCK_M], tl.int32) + start, mask=valid_m)


@triton.jit
def gate(qk, scale, visible):
    """By how much a query counts each key: nothing of those that it does not see."""
    return tl.where(visible, 1.0 / (1.0 + tl.exp2(qk * (-LOG2E * scale))), 0.0)


@triton.jit
def sum_tile(x, take, DTYPE: tl.constexpr, PART: tl.constexpr):
    """For each column of a tile of float32 the sum of those that `take` has; in two parts where DTYPE is no float32."""
    if tl.float32 == DTYPE:
        return tl.dot(x, take.to(tl.float32), input_precision="ieee")
    else:
        high = x.to(PART)
        low = (x - high.to(tl.float32)).to(PART)
        return tl.dot(low, take.to(PART), tl.dot(high, take.to(PART)))


@triton.jit
def near_keys(bounds_ptr, starts_ptr, ends_ptr, offs_m, valid_m, num_queries, num_keys, BLOCK_N: tl.constexpr):
    """The first and the last near key of a block's queries; and the tiles with them: the key after the last one, how
    many tiles from there on need gates, and how many more have nothing but keys with the largest count.
    """
    first_key = tl.load(bounds_ptr + offs_m, mask=valid_m, other=num_keys)
    last_key = tl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1)
    first_key = tl.maximum(first_key, tl.load(starts_ptr + offs_m, mask=valid_m, other=0))
    high = round_up(tl.minimum(tl.max(last_key) + 1, num_keys), BLOCK_N)
    low = tl.minimum(round_down(tl.min(first_key), BLOCK_N), high)
    end = tl.min(tl.load(ends_ptr + offs_m, mask=valid_m, other=num_keys))
    end = clamp(round_down(end, BLOCK_N), low, high)
    return first_key, last_key, high, (high - end) // BLOCK_N, (end - low) // BLOCK_N


@triton.jit
def interpolate(row_ptrs, counts, limit):
    """The products of queries with the vectors of their counts; the row below, how far above it counts are, and by how
    much products grow there with the count.
    """
    counts = tl.minimum(counts, limit)
    below = tl.minimum(counts, limit - 1.0).to(tl.int32)
    share = counts - below.to(tl.float32)
    below = tl.max_contiguous(below, [1, 2])  # which they are not: for a layout whose threads read along a row
    product = tl.load(row_ptrs + below)
    slope = tl.load(row_ptrs + below + 1) - product
    return product + slope * share, below, share, tl.where(counts < limit, slope, 0.0)


@triton.jit
def near_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, by_row_ptr, starts_ptr, ends_ptr, bounds_ptr, key_mask_ptr,
                sink_logits_ptr, num_queries, num_keys, num_heads, group_size, num_rows, stride_row, scale, softcap,
                stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                stride_boundsb, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
                HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Outputs of attention to near keys `[B, Tq, H, D]`, and the logsumexp of their scores to base 2, `[B, H, Tq]`."""
    block_id, head, batch, offs_m = query_block(num_queries, num_heads, BLOCK_M)
    valid_m, offs_n = offs_m < num_queries, tl.arange(0, BLOCK_N)
    row = (batch * num_heads + head) * num_queries
    row_ptrs = by_row_ptr + (row + tl.minimum(offs_m, num_queries - 1))[:, None] * stride_row
    first_key, last_key, high, counted_tiles, other_tiles = near_keys(
        bounds_ptr + batch * stride_boundsb, starts_ptr + batch * num_queries, ends_ptr + row, offs_m, valid_m,
        num_queries, num_keys, BLOCK_N,
    )  # fmt: skip
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    q = load_tile(q_ptr + batch * stride_qb + head * stride_qh, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M,
                  BLOCK_D, HEAD_DIM, False)  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:  # as if a key with that score and no value had been seen
        l_i += 1.0
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits_ptr + batch * num_heads + head) * LOG2E
    limit = (num_rows - 1).to(tl.float32)
    from_key = offs_n[:, None] >= offs_n[None, :]
    counts = tl.zeros([BLOCK_M], tl.float32)
    for t in range(counted_tiles):
        start = high - (t + 1) * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key[:, None], last_key[:, None], 0, 0, key_mask_ptr, False,
            HAS_KEY_MASK,
        )  # fmt: skip
        gates = gate(qk, scale, visible)
        bias, _, _, _ = interpolate(row_ptrs, counts[:, None] + sum_tile(gates, from_key, q.dtype, tl.float16), limit)
        counts += tl.sum(gates, 1)
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        scores = tl.where(visible, scores + bias * LOG2E, float("-inf"))
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, True)
    bias = tl.load(row_ptrs + num_rows - 1) * LOG2E
    for t in range(counted_tiles, counted_tiles + other_tiles):
        start = high - (t + 1) * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key[:, None], last_key[:, None], 0, 0, key_mask_ptr, False,
            HAS_KEY_MASK,
        )  # fmt: skip
        acc, l_i, m_i = online_softmax(tl.where(visible, scores + bias, float("-inf")), v, acc, l_i, m_i, True)
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=valid_m[:, None] & (offs_d < HEAD_DIM)[None, :])
    lse = tl.where(empty, float("inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))
    tl.store(lse_ptr + row + offs_m, lse, mask=valid_m)
