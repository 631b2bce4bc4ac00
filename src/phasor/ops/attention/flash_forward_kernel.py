"""The forward kernel of attention over key intervals: one program per block of queries of one head.

Unmasked tiles are those whose keys all queries of the block see, and which with a table of biases are so far away that
one entry of it serves the tile. Nearer ones are unmasked too where positions are contiguous, and look up the table by
index. All others are masked tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_lines import add_key_lines, load_spans
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    LOG2E,
    NO_BIAS,
    NON_CONTIGUOUS,
    SUMS,
    TABLE,
    add_bias,
    add_key_bias,
    distances,
    key_part,
    key_segments,
    load_place,
    load_positions,
    load_tile,
    masked_start,
    query_bias,
    query_block,
    query_part,
    score_tile,
    table_entries,
    table_rows,
    unmasked_start,
    visible_keys,
)
from phasor.ops.online_softmax import online_softmax


@triton.jit
def log_weight(m_i, weight):
    """The logarithm of a sum of weights that is relative to `m_i`."""
    return tl.where(weight > 0.0, m_i + tl.log2(tl.where(weight > 0.0, weight, 1.0)), float("-inf"))


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, weights_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr,
                   k_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr, table_ptr, spans_ptr, knots_ptr,
                   sink_logits_ptr, sink_q_ptr, sink_pos_ptr,
                   num_queries, num_keys, num_heads, group_size, min_distance, num_distances, scale, softcap,
                   stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                   stride_boundsb, stride_qposb, stride_qposh, stride_kposb, stride_kposh, stride_shiftsb,
                   stride_spansb, stride_sinkposb,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BIAS: tl.constexpr, NUM_KNOTS: tl.constexpr, ONE_SIDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                   HAS_SINKS: tl.constexpr, TWO_INTERVALS: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
                   HAS_SINK_QUERIES: tl.constexpr, USE_ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr):  # fmt: skip
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, `[B, H, Tq]`.

    With HAS_WEIGHTS also the logarithms of the weights by entry of the table, `[B, H, Tq, distances]`, from which the
    logsumexp is to be subtracted. No two keys that a query sees have one entry but the first or the last.
    """
    block_id, head, batch, offs_m = query_block(num_queries, num_heads, BLOCK_M)
    valid_m = offs_m < num_queries
    if BIAS != NO_BIAS:
        q_pos_ptr += batch * stride_qposb + head * stride_qposh
        k_pos_ptr += batch * stride_kposb + head * stride_kposh
    row_ptrs = table_ptr
    if BIAS != NO_BIAS and BIAS != SUMS and BIAS != LINES:
        shifts_ptr += batch * stride_shiftsb
    if BIAS == TABLE:
        row_ptrs = table_rows(table_ptr, batch, head, offs_m[:, None], num_queries, num_heads, num_distances, USE_ROWS)
    if BIAS == LINES:
        table_ptr += head * num_distances
    q_high, q_low, slope, curve_param, shift, bias_ahead, bias_behind = query_bias(
        q_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr, row_ptrs, head, block_id * BLOCK_M, offs_m, num_queries,
        num_distances, BLOCK_M, BIAS,
    )  # fmt: skip
    if BIAS == LINES:
        knots = tl.load(knots_ptr + tl.arange(0, NUM_KNOTS))
        inverse_span, query_range = load_spans(
            spans_ptr + batch * stride_spansb, q_pos_ptr, block_id * BLOCK_M, num_queries, BLOCK_M
        )
        inverse_span = inverse_span[:, None]
    first_key, last_key, first_key2, last_key2, unmasked, masked = key_segments(
        bounds_ptr + batch * stride_boundsb, offs_m, valid_m, num_queries, num_keys,
        shift, min_distance, num_distances, BLOCK_N, BIAS, TWO_INTERVALS, HAS_SINK_QUERIES,
    )  # fmt: skip
    sinks_end = tl.max(last_key2) + 1 if HAS_SINK_QUERIES else 0
    first_key, last_key = first_key[:, None], last_key[:, None]
    first_key2, last_key2 = first_key2[:, None], last_key2[:, None]
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    if HAS_SINK_QUERIES:
        sink_q_ptr += (batch * num_queries * num_heads + head) * HEAD_DIM
        if BIAS != NO_BIAS:
            sink_pos_ptr += batch * stride_sinkposb
    q_ptr += batch * stride_qb + head * stride_qh
    q = load_tile(q_ptr, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:  # as if a key with that score and no value had been seen
        l_i += 1.0
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits_ptr + head).to(tl.float32) * LOG2E
    l_ahead, l_behind = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    weight_ptrs = weights_ptr
    if HAS_WEIGHTS:
        weight_ptrs = table_rows(weights_ptr, batch, head, offs_m[:, None], num_queries, num_heads, num_distances, True)
    high, low = load_place(q_pos_ptr, block_id * BLOCK_M, num_queries, BIAS)
    place = block_id * BLOCK_M + shift
    if ONE_SIDED:  # in unmasked tiles, scores are without the part of the bias that all keys of a query share
        own = tl.sum(query_part(q_high, q_low, (offs_m + shift)[:, None], high, low, place, shift, slope, BIAS), 1)
        m_i -= own
    if BIAS == SUMS and ONE_SIDED:  # read one tile ahead
        sums = load_positions(k_pos_ptr, unmasked[0], num_keys, BLOCK_N, BIAS)
        column = key_part(sums[0], sums[1], 0, high, low, place, slope, BIAS)
    for t in range(unmasked[1] + unmasked[3]):
        start = unmasked_start(t, unmasked, BLOCK_N, BIAS)
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == SUMS and ONE_SIDED:
            following = load_positions(k_pos_ptr, start + BLOCK_N, num_keys, BLOCK_N, BIAS)
            scores += column[None, :]
            column = key_part(following[0], following[1], 0, high, low, place, slope, BIAS)
        elif BIAS == LINES:
            scores, _, _, _, _ = add_key_lines(
                scores, k_pos_ptr, start, num_keys, q_high, inverse_span, curve_param, query_range, knots, knots_ptr,
                table_ptr, BLOCK_N,
            )  # fmt: skip
        elif BIAS >= LINEAR:
            scores, _ = add_key_bias(
                scores, k_pos_ptr, row_ptrs, start, num_keys, q_high, q_low, offs_m, shift, slope, curve_param,
                high, low, place, min_distance, num_distances, BLOCK_N, BIAS, ONE_SIDED, False,
            )  # fmt: skip
        elif BIAS == TABLE:
            scores += tl.where(t < unmasked[1], bias_behind, bias_ahead)
        if HAS_KEY_MASK:
            is_real = tl.load(key_mask_ptr + start + tl.arange(0, BLOCK_N))[None, :] != 0
            scores = tl.where(is_real, scores, float("-inf"))
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        l_before, m_before = l_i, m_i
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, HAS_KEY_MASK)
        if HAS_WEIGHTS:
            alpha = tl.exp2(m_before - tl.where(m_i == float("-inf"), 0.0, m_i))
            added = tl.maximum(l_i - l_before * alpha, 0.0)
            l_ahead = l_ahead * alpha + tl.where(t < unmasked[1], 0.0, added)
            l_behind = l_behind * alpha + tl.where(t < unmasked[1], added, 0.0)
    if ONE_SIDED:
        m_i += own
    near_tiles = masked[5]
    if BIAS == TABLE and not HAS_WEIGHTS:  # by index, where positions are contiguous
        near_tiles = tl.where(shift == NON_CONTIGUOUS, near_tiles, 0)
        for t in tl.range(masked[5] - near_tiles, num_stages=2):  # its entries are a tile in shared memory too
            start = masked[4] + t * BLOCK_N
            k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            scores, _ = score_tile(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, HAS_SOFTCAP, q.dtype)
            distance = (offs_m + shift - start)[:, None] - tl.arange(0, BLOCK_N)[None, :]
            scores += tl.load(row_ptrs + table_entries(distance, min_distance, num_distances))
            if HAS_KEY_MASK:
                is_real = tl.load(key_mask_ptr + start + tl.arange(0, BLOCK_N))[None, :] != 0
                scores = tl.where(is_real, scores, float("-inf"))
            v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
            acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, HAS_KEY_MASK)
    masked = (masked[0], masked[1], masked[2], masked[3], masked[4], near_tiles, masked[6], masked[7])
    for t in range(masked[1] + masked[3] + masked[5] + masked[7]):
        start = masked_start(t, masked, BLOCK_N)
        offs_n = (start + tl.arange(0, BLOCK_N))[None, :]
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == LINES:
            scores, _, _, _, _ = add_key_lines(
                scores, k_pos_ptr, start, num_keys, q_high, inverse_span, curve_param, query_range, knots, knots_ptr,
                table_ptr, BLOCK_N,
            )  # fmt: skip
        elif BIAS != NO_BIAS:
            scores, entry = add_key_bias(
                scores, k_pos_ptr, row_ptrs, start, num_keys, q_high, q_low, offs_m, shift, slope, curve_param,
                high, low, place, min_distance, num_distances, BLOCK_N, BIAS, False, TWO_INTERVALS or BIAS == TABLE,
            )  # fmt: skip
        if HAS_SINK_QUERIES:  # noqa: SIM102 (the first is known when the kernel is compiled, the second is not)
            if start < sinks_end:  # sink tokens have other queries and positions
                sink_q = load_tile(
                    sink_q_ptr, block_id * BLOCK_M, num_heads * HEAD_DIM, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False
                )
                qk = tl.dot(sink_q, tl.trans(k), input_precision="ieee")
                sink_scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
                if BIAS != NO_BIAS:
                    s_high, s_low = load_positions(sink_pos_ptr, block_id * BLOCK_M, num_queries, BLOCK_M, BIAS)
                    ks_high, ks_low = load_positions(k_pos_ptr, start, num_keys, BLOCK_N, BIAS)
                    distance = distances(s_high[:, None], s_low[:, None], ks_high[None, :], ks_low[None, :], BIAS)
                    sink_scores, _entry = add_bias(
                        sink_scores, distance, row_ptrs, slope, curve_param, min_distance, num_distances, BIAS
                    )
                scores = tl.where((offs_n >= first_key2) & (offs_n <= last_key2), sink_scores, scores)
        visible = visible_keys(
            offs_n, num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr, TWO_INTERVALS, HAS_KEY_MASK
        )
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        scores, m_before = tl.where(visible, scores, float("-inf")), m_i
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, True)
        if HAS_WEIGHTS:
            inside = (entry > 0) & (entry < num_distances - 1)
            tl.store(weight_ptrs + entry, scores, mask=inside & visible & valid_m[:, None])
            m_finite = tl.where(m_i == float("-inf"), 0.0, m_i)
            p, alpha = tl.exp2(scores - m_finite[:, None]), tl.exp2(m_before - m_finite)
            l_ahead = l_ahead * alpha + tl.sum(tl.where(entry == 0, p, 0.0), 1)
            l_behind = l_behind * alpha + tl.sum(tl.where(entry == num_distances - 1, p, 0.0), 1)
    if HAS_WEIGHTS:
        tl.store(weight_ptrs, log_weight(m_i, l_ahead)[:, None], mask=valid_m[:, None])
        tl.store(weight_ptrs + num_distances - 1, log_weight(m_i, l_behind)[:, None], mask=valid_m[:, None])
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=valid_m[:, None] & (offs_d < HEAD_DIM)[None, :])
    # Infinite for a query that sees nothing, so that its weights come out as zeros again.
    lse = tl.where(empty, float("inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))
    tl.store(lse_ptr + (batch * num_heads + head) * num_queries + offs_m, lse, mask=valid_m)
