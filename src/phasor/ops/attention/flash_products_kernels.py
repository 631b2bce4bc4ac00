"""Kernels of attention whose scores have products by distance added: entries of a row of each query, or of each key.

A launch takes the queries from `from_query` to `to_query`. Rows of these, `[H, B, queries, stride_row]`, and rows of
keys, `[H, B, Tk, stride_row]`, have one entry per distance from `first_distance` on, to base 2; what is beyond either
end has the entry at that end. With HAS_ENDS there is something beyond: far tiles then have one entry per query and one
per key. Without it every key that a query sees has its own entry.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import (
    LOG2E,
    NON_CONTIGUOUS,
    TABLE,
    key_segments,
    load_tile,
    masked_start,
    score_tile,
    unmasked_start,
    visible_keys,
)
from phasor.ops.online_softmax import online_softmax


@triton.jit
def rows_from(rows_ptr, head, batch, batches, start, rows, stride_row, HAS_ANY: tl.constexpr):
    """A pointer to the row of a query or a key, given by index out of `rows`; no pointer where there are none."""
    row = start
    if HAS_ANY:
        row = rows_ptr + ((head.to(tl.int64) * batches + batch) * rows + start) * stride_row
    return row


@triton.jit
def row_offsets(start, rows, stride_row, BLOCK: tl.constexpr):
    """Where the rows of a tile from `start` on lie; the last row's for those past the end."""
    return tl.minimum(tl.arange(0, BLOCK), rows - 1 - start) * stride_row


@triton.jit
def load_ints(ptr, index, limit):
    """Positions, zeros past the limit."""
    return tl.load(ptr + index, mask=index < limit, other=0)


@triton.jit
def entries_of(offsets, q_pos, k_pos, first_distance, num_distances, USE_KEYS: tl.constexpr, USE_COLUMNS: tl.constexpr,
               HAS_ENDS: tl.constexpr):  # fmt: skip
    """Where the entries of a tile's pairs lie in the rows of queries, or with USE_KEYS of keys.

    They rise or fall by one from row to row of the tile, or with USE_COLUMNS from column to column: that is said so
    that they are read together.
    """
    if HAS_ENDS:
        found = offsets + tl.minimum(tl.maximum(q_pos - k_pos - first_distance, 0), num_distances - 1).to(tl.int32)
    elif USE_KEYS:
        found = (offsets - k_pos - first_distance) + q_pos
    else:
        found = (offsets + q_pos - first_distance) - k_pos
    return tl.max_contiguous(found, [1, found.shape[1]] if USE_COLUMNS else [found.shape[0], 1])


@triton.jit
def pair_bias(q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances,
              HAS_ROWS: tl.constexpr, HAS_KEY_ROWS: tl.constexpr, HAS_KEYS_ACROSS: tl.constexpr,
              HAS_ENDS: tl.constexpr):  # fmt: skip
    """What is added to the scores of all pairs of a tile; with HAS_KEYS_ACROSS its columns are keys, else its rows."""
    bias = 0.0
    if HAS_ROWS:
        bias = tl.load(
            q_row_ptr
            + entries_of(q_offsets, q_pos, k_pos, first_distance, num_distances, False, HAS_KEYS_ACROSS, HAS_ENDS)
        )
    if HAS_KEY_ROWS:
        of_keys = tl.load(
            k_row_ptr
            + entries_of(k_offsets, q_pos, k_pos, first_distance, num_distances, True, 1 - HAS_KEYS_ACROSS, HAS_ENDS)
        )
        bias = tl.cast(bias, tl.float32) + of_keys.to(tl.float32) if HAS_ROWS else of_keys
    return bias


@triton.jit
def load_ends(row_ptr, offsets, num_distances, HAS_ROWS: tl.constexpr):
    """The first and the last entry of rows: those of keys that are far ahead and far behind."""
    ahead, behind = 0.0, 0.0
    if HAS_ROWS:
        ahead = tl.load(row_ptr + offsets).to(tl.float32)
        behind = tl.load(row_ptr + offsets + num_distances - 1).to(tl.float32)
    return ahead, behind


@triton.jit
def products_forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, rows_ptr, key_rows_ptr, key_ends_ptr, bounds_ptr,
                            key_mask_ptr, q_pos_ptr, k_pos_ptr, shifts_ptr, sink_logits_ptr,
                            from_query, to_query, num_queries, num_keys, num_heads, group_size, batches,
                            first_distance, num_distances, stride_row, scale, softcap,
                            stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
                            stride_vb, stride_vt, stride_vh, stride_boundsb, stride_qposb, stride_kposb, stride_shiftsb,
                            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                            BLOCK_N: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_KEY_ROWS: tl.constexpr,
                            HAS_ENDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
                            TWO_INTERVALS: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, `[B, H, Tq]`."""
    blocks = tl.cdiv(to_query - from_query, BLOCK_M)
    pid = tl.program_id(0)
    start_m = from_query + (blocks - 1 - pid % blocks) * BLOCK_M  # the last blocks have most to do and come first
    head, batch = pid // blocks % num_heads, (pid // blocks // num_heads).to(tl.int64)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    valid_m = offs_m < to_query
    q_pos = load_ints(q_pos_ptr + batch * stride_qposb, offs_m, to_query)[:, None]
    k_pos_ptr += batch * stride_kposb
    num_rows = to_query - from_query
    q_row_ptr = rows_from(rows_ptr, head, batch, batches, start_m - from_query, num_rows, stride_row, HAS_ROWS)
    q_offsets = row_offsets(start_m, to_query, stride_row, BLOCK_M)[:, None]
    shift = tl.load(shifts_ptr + batch * stride_shiftsb) if HAS_ENDS else NON_CONTIGUOUS
    first_key, last_key, first_key2, last_key2, far, masked = key_segments(
        bounds_ptr + batch * stride_boundsb, offs_m, valid_m, num_queries, num_keys,
        shift, first_distance, num_distances, BLOCK_N, TABLE, TWO_INTERVALS, False,
    )  # fmt: skip
    first_key, last_key = first_key[:, None], last_key[:, None]
    first_key2, last_key2 = first_key2[:, None], last_key2[:, None]
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    q = load_tile(
        q_ptr + batch * stride_qb + head * stride_qh, start_m, stride_qt, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:  # as if a key with that score and no value had been seen
        l_i += 1.0
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits_ptr + head).to(tl.float32) * LOG2E
    if HAS_ENDS:
        ahead, behind = load_ends(q_row_ptr, q_offsets, num_distances, HAS_ROWS)
        key_ends = (head.to(tl.int64) * batches + batch) * num_keys
        to_behind = tl.cast(num_heads, tl.int64) * batches * num_keys
        for t in range(far[1] + far[3]):
            start = unmasked_start(t, far, BLOCK_N, TABLE)
            k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
            if HAS_ROWS:
                scores += tl.where(t < far[1], behind, ahead)
            if HAS_KEY_ROWS:
                ends = key_ends + tl.where(t < far[1], to_behind, 0)
                scores += tl.load(key_ends_ptr + ends + start + offs_n)[None, :]
            if HAS_KEY_MASK:
                scores = tl.where(tl.load(key_mask_ptr + start + offs_n)[None, :] != 0, scores, float("-inf"))
            v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, HAS_KEY_MASK)
    near, near_tiles = masked[4], masked[5]
    k_pos = load_ints(k_pos_ptr, near + offs_n, num_keys)[None, :]
    k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, near, num_keys, stride_row, HAS_KEY_ROWS)
    k_offsets = row_offsets(near, num_keys, stride_row, BLOCK_N)[None, :]
    bias = pair_bias(
        q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
        HAS_KEY_ROWS, 1, HAS_ENDS,
    )  # fmt: skip
    for t in range(near_tiles):
        start = near + t * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        k_pos = load_ints(k_pos_ptr, start + BLOCK_N + offs_n, num_keys)[None, :]  # read one tile ahead
        k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, start + BLOCK_N, num_keys, stride_row, HAS_KEY_ROWS)
        k_offsets = row_offsets(start + BLOCK_N, num_keys, stride_row, BLOCK_N)[None, :]
        following = pair_bias(
            q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
            HAS_KEY_ROWS, 1, HAS_ENDS,
        )  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        scores += bias
        bias = following
        if HAS_KEY_MASK:
            scores = tl.where(tl.load(key_mask_ptr + start + offs_n)[None, :] != 0, scores, float("-inf"))
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, HAS_KEY_MASK)
    masked = (masked[0], masked[1], masked[2], masked[3], near, 0, masked[6], masked[7])
    for t in range(masked[1] + masked[3] + masked[7]):
        start = masked_start(t, masked, BLOCK_N)
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        k_pos = load_ints(k_pos_ptr, start + offs_n, num_keys)[None, :]
        k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, start, num_keys, stride_row, HAS_KEY_ROWS)
        k_offsets = row_offsets(start, num_keys, stride_row, BLOCK_N)[None, :]
        bias = pair_bias(
            q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
            HAS_KEY_ROWS, 1, HAS_ENDS,
        )  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr,
            TWO_INTERVALS, HAS_KEY_MASK,
        )  # fmt: skip
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        acc, l_i, m_i = online_softmax(tl.where(visible, scores + bias, float("-inf")), v, acc, l_i, m_i, True)
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=valid_m[:, None] & (offs_d < HEAD_DIM)[None, :])
    # Infinite for a query that sees nothing, so that its weights come out as zeros again.
    lse = tl.where(empty, float("inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))
    tl.store(lse_ptr + (batch * num_heads + head) * num_queries + offs_m, lse, mask=valid_m)


@triton.jit
def end_sums(ds, q_pos, k_pos, first_distance, num_distances):
    """The sums along rows of a tile of what has the first entry, and the last; and which pairs have one in between."""
    entry = q_pos - k_pos - first_distance
    ahead, behind = entry <= 0, entry >= num_distances - 1
    return tl.sum(tl.where(ahead, ds, 0.0), 1), tl.sum(tl.where(behind, ds, 0.0), 1), ~(ahead | behind)


@triton.jit
def products_dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, drows_ptr, rows_ptr, key_rows_ptr,
                       key_ends_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr, k_pos_ptr, shifts_ptr,
                       from_query, to_query, num_queries, num_keys, num_heads, group_size, batches,
                       first_distance, num_distances, stride_row, scale, softcap,
                       stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
                       stride_vb, stride_vt, stride_vh, stride_dob, stride_dot, stride_doh,
                       stride_boundsb, stride_qposb, stride_kposb, stride_shiftsb,
                       HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       HAS_ROWS: tl.constexpr, HAS_KEY_ROWS: tl.constexpr, HAS_ENDS: tl.constexpr,
                       HAS_SOFTCAP: tl.constexpr, TWO_INTERVALS: tl.constexpr,
                       HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Gradients of queries, and of the entries of their rows, which are zeros before."""
    blocks = tl.cdiv(to_query - from_query, BLOCK_M)
    pid = tl.program_id(0)
    start_m = from_query + (blocks - 1 - pid % blocks) * BLOCK_M
    head, batch = pid // blocks % num_heads, (pid // blocks // num_heads).to(tl.int64)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    valid_m = offs_m < to_query
    q_pos = load_ints(q_pos_ptr + batch * stride_qposb, offs_m, to_query)[:, None]
    k_pos_ptr += batch * stride_kposb
    num_rows = to_query - from_query
    q_row_ptr = rows_from(rows_ptr, head, batch, batches, start_m - from_query, num_rows, stride_row, HAS_ROWS)
    q_offsets = row_offsets(start_m, to_query, stride_row, BLOCK_M)[:, None]
    drow_ptr = rows_from(drows_ptr, head, batch, batches, start_m - from_query, num_rows, stride_row, HAS_ROWS)
    shift = tl.load(shifts_ptr + batch * stride_shiftsb) if HAS_ENDS else NON_CONTIGUOUS
    first_key, last_key, first_key2, last_key2, far, masked = key_segments(
        bounds_ptr + batch * stride_boundsb, offs_m, valid_m, num_queries, num_keys,
        shift, first_distance, num_distances, BLOCK_N, TABLE, TWO_INTERVALS, False,
    )  # fmt: skip
    first_key, last_key = first_key[:, None], last_key[:, None]
    first_key2, last_key2 = first_key2[:, None], last_key2[:, None]
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    q = load_tile(
        q_ptr + batch * stride_qb + head * stride_qh, start_m, stride_qt, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False
    )
    do_ptr += batch * stride_dob + head * stride_doh
    do = load_tile(do_ptr, start_m, stride_dot, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False)
    row = (batch * num_heads + head) * num_queries + offs_m
    lse = tl.load(lse_ptr + row, mask=valid_m, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + row, mask=valid_m, other=0.0)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dahead, dbehind = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if HAS_ENDS:
        ahead, behind = load_ends(q_row_ptr, q_offsets, num_distances, HAS_ROWS)
        key_ends = (head.to(tl.int64) * batches + batch) * num_keys
        to_behind = tl.cast(num_heads, tl.int64) * batches * num_keys
        for t in range(far[1] + far[3]):
            start = unmasked_start(t, far, BLOCK_N, TABLE)
            k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
            if HAS_ROWS:
                scores += tl.where(t < far[1], behind, ahead)
            if HAS_KEY_ROWS:
                ends = key_ends + tl.where(t < far[1], to_behind, 0)
                scores += tl.load(key_ends_ptr + ends + start + offs_n)[None, :]
            p = tl.exp2(scores - lse)
            if HAS_KEY_MASK:
                p = tl.where(tl.load(key_mask_ptr + start + offs_n)[None, :] != 0, p, 0.0)
            v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
            ds_rows = tl.sum(ds, 1)
            dbehind += tl.where(t < far[1], ds_rows, 0.0)
            dahead += tl.where(t < far[1], 0.0, ds_rows)
            if HAS_SOFTCAP:
                ds *= 1.0 - tanh * tanh
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    near, near_tiles = masked[4], masked[5]
    k_pos = load_ints(k_pos_ptr, near + offs_n, num_keys)[None, :]
    k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, near, num_keys, stride_row, HAS_KEY_ROWS)
    k_offsets = row_offsets(near, num_keys, stride_row, BLOCK_N)[None, :]
    bias = pair_bias(
        q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
        HAS_KEY_ROWS, 1, HAS_ENDS,
    )  # fmt: skip
    for t in range(near_tiles):
        start = near + t * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        own_k_pos = k_pos
        k_pos = load_ints(k_pos_ptr, start + BLOCK_N + offs_n, num_keys)[None, :]  # read one tile ahead
        k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, start + BLOCK_N, num_keys, stride_row, HAS_KEY_ROWS)
        k_offsets = row_offsets(start + BLOCK_N, num_keys, stride_row, BLOCK_N)[None, :]
        following = pair_bias(
            q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
            HAS_KEY_ROWS, 1, HAS_ENDS,
        )  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        p = tl.exp2(scores + bias - lse)
        bias = following
        inside = valid_m[:, None] & (offs_n < BLOCK_N)[None, :]
        if HAS_KEY_MASK:
            inside &= tl.load(key_mask_ptr + start + offs_n)[None, :] != 0
            p = tl.where(inside, p, 0.0)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        if HAS_ROWS:
            if HAS_ENDS:
                more_ahead, more_behind, between = end_sums(ds, q_pos, own_k_pos, first_distance, num_distances)
                dahead, dbehind, inside = dahead + more_ahead, dbehind + more_behind, inside & between
            entries = entries_of(q_offsets, q_pos, own_k_pos, first_distance, num_distances, False, 1, HAS_ENDS)
            tl.store(drow_ptr + entries, ds.to(drows_ptr.dtype.element_ty), mask=inside)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    masked = (masked[0], masked[1], masked[2], masked[3], near, 0, masked[6], masked[7])
    for t in range(masked[1] + masked[3] + masked[7]):
        start = masked_start(t, masked, BLOCK_N)
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        k_pos = load_ints(k_pos_ptr, start + offs_n, num_keys)[None, :]
        k_row_ptr = rows_from(key_rows_ptr, head, batch, batches, start, num_keys, stride_row, HAS_KEY_ROWS)
        k_offsets = row_offsets(start, num_keys, stride_row, BLOCK_N)[None, :]
        bias = pair_bias(
            q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
            HAS_KEY_ROWS, 1, HAS_ENDS,
        )  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr,
            TWO_INTERVALS, HAS_KEY_MASK,
        )  # fmt: skip
        p = tl.where(visible, tl.exp2(scores + bias - lse), 0.0)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        if HAS_ROWS:
            inside = visible & valid_m[:, None]
            if HAS_ENDS:
                more_ahead, more_behind, between = end_sums(ds, q_pos, k_pos, first_distance, num_distances)
                dahead, dbehind, inside = dahead + more_ahead, dbehind + more_behind, inside & between
            entries = entries_of(q_offsets, q_pos, k_pos, first_distance, num_distances, False, 1, HAS_ENDS)
            tl.store(drow_ptr + entries, ds.to(drows_ptr.dtype.element_ty), mask=inside)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    if HAS_ROWS and HAS_ENDS:
        dtype = drows_ptr.dtype.element_ty
        tl.store(drow_ptr + q_offsets, dahead[:, None].to(dtype), mask=valid_m[:, None])
        tl.store(drow_ptr + q_offsets + num_distances - 1, dbehind[:, None].to(dtype), mask=valid_m[:, None])
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    in_range = valid_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_range)
