"""The gradients of queries and of a bias table: one program per block of queries of one head."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_lines import (
    add_key_lines,
    add_line_gradients,
    add_to_line,
    load_spans,
)
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    LOG,
    LOG2E,
    NO_BIAS,
    SUMS,
    TABLE,
    add_key_bias,
    curve,
    curve_derivative,
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
    sign,
    table_rows,
    unmasked_start,
    visible_keys,
)


@triton.jit
def delta_kernel(out_ptr, do_ptr, delta_ptr, num_queries, num_heads, rows, stride_dob, stride_dot, stride_doh,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """For each query and head the dot product of its output and its output's gradient, `[B, H, Tq]`."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # of [B, Tq, H]
    batch, token, head = offs_m // (num_queries * num_heads), offs_m // num_heads % num_queries, offs_m % num_heads
    offs_d = tl.arange(0, BLOCK_D)
    in_range = (offs_m < rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(out_ptr + offs_m[:, None] * HEAD_DIM + offs_d[None, :], mask=in_range, other=0.0).to(tl.float32)
    offsets = batch * stride_dob + token * stride_dot + head * stride_doh
    y = tl.load(do_ptr + offsets[:, None] + offs_d[None, :], mask=in_range, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * num_heads + head) * num_queries + token, tl.sum(x * y, 1), mask=offs_m < rows)


@triton.jit
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dweights_ptr, dq_ptr, dtable_ptr, dcurve_ptr,
              dsums_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr, k_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr,
              table_ptr, spans_ptr, knots_ptr, num_queries, num_keys, num_heads, group_size, min_distance,
              num_distances, scale, softcap, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
              stride_vb, stride_vt, stride_vh, stride_dob, stride_dot, stride_doh, stride_boundsb,
              stride_qposb, stride_qposh, stride_kposb, stride_kposh, stride_shiftsb, stride_spansb,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BIAS: tl.constexpr, NUM_KNOTS: tl.constexpr, ONE_SIDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
              HAS_TABLE_GRAD: tl.constexpr, HAS_CURVE_GRAD: tl.constexpr, HAS_SUM_GRAD: tl.constexpr,
              TWO_INTERVALS: tl.constexpr,
              HAS_KEY_MASK: tl.constexpr, USE_ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr):  # fmt: skip
    """Gradients of queries; with HAS_TABLE_GRAD also every program's part of the gradient of the bias table, and with
    HAS_CURVE_GRAD its part of the sums that the gradients of slopes and of the parameter of their curve are made of.
    With HAS_SUM_GRAD the gradients of the sums of queries. Lines have theirs in the places of a table, of the parameter
    of a curve, and of sums: those of inverse spans.
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
    if HAS_TABLE_GRAD and USE_ROWS:
        dtable_ptrs = table_rows(dtable_ptr, batch, head, offs_m[:, None], num_queries, num_heads, num_distances, True)
    elif HAS_TABLE_GRAD:
        dtable_ptr += tl.cast(tl.program_id(0), tl.int64) * num_distances
        dtable_ptrs = dtable_ptr
    dweight_ptrs, dweight_ahead, dweight_behind = dweights_ptr, 0.0, 0.0
    if HAS_WEIGHTS:
        dweight_ptrs = table_rows(
            dweights_ptr, batch, head, offs_m[:, None], num_queries, num_heads, num_distances, True
        )
        dweight_ahead, dweight_behind = tl.load(dweight_ptrs), tl.load(dweight_ptrs + num_distances - 1)
    first_key, last_key, first_key2, last_key2, unmasked, masked = key_segments(
        bounds_ptr + batch * stride_boundsb, offs_m, valid_m, num_queries, num_keys,
        shift, min_distance, num_distances, BLOCK_N, BIAS, TWO_INTERVALS, False,
    )  # fmt: skip
    first_key, last_key = first_key[:, None], last_key[:, None]
    first_key2, last_key2 = first_key2[:, None], last_key2[:, None]
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh
    v_ptr += batch * stride_vb + (head // group_size) * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    q_ptr += batch * stride_qb + head * stride_qh
    q = load_tile(q_ptr, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
    do_ptr += batch * stride_dob + head * stride_doh
    do = load_tile(do_ptr, block_id * BLOCK_M, stride_dot, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
    row = (batch * num_heads + head) * num_queries + offs_m
    lse = tl.load(lse_ptr + row, mask=valid_m, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + row, mask=valid_m, other=0.0)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dbias_behind, dbias_ahead = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    by_slope, by_param = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    by_sum = tl.zeros([BLOCK_M], tl.float32)
    line, by_share, by_rate = 0, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    of_slope, of_offset = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    high, low = load_place(q_pos_ptr, block_id * BLOCK_M, num_queries, BIAS)
    place, own_lse = block_id * BLOCK_M + shift, lse
    if ONE_SIDED:
        own_lse -= query_part(q_high, q_low, (offs_m + shift)[:, None], high, low, place, shift, slope, BIAS)
    if BIAS == SUMS and ONE_SIDED:  # read one tile ahead
        sums = load_positions(k_pos_ptr, unmasked[0], num_keys, BLOCK_N, BIAS)
        column = key_part(sums[0], sums[1], 0, high, low, place, slope, BIAS)
    for t in range(unmasked[1] + unmasked[3]):
        start = unmasked_start(t, unmasked, BLOCK_N, BIAS)
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == SUMS and ONE_SIDED:
            following = load_positions(k_pos_ptr, start + BLOCK_N, num_keys, BLOCK_N, BIAS)
            scores += column[None, :]
            column = key_part(following[0], following[1], 0, high, low, place, slope, BIAS)
        elif BIAS == LINES:
            scores, distance, share, first, last = add_key_lines(
                scores, k_pos_ptr, start, num_keys, q_high, inverse_span, curve_param, query_range, knots, knots_ptr,
                table_ptr, BLOCK_N,
            )  # fmt: skip
        elif BIAS >= LINEAR:
            scores, distance = add_key_bias(
                scores, k_pos_ptr, row_ptrs, start, num_keys, q_high, q_low, offs_m, shift, slope, curve_param,
                high, low, place, min_distance, num_distances, BLOCK_N, BIAS, ONE_SIDED, False,
            )  # fmt: skip
        elif BIAS == TABLE:
            scores += tl.where(t < unmasked[1], bias_behind, bias_ahead)
        p = tl.exp2(scores - own_lse)
        if HAS_KEY_MASK:
            p = tl.where(tl.load(key_mask_ptr + start + tl.arange(0, BLOCK_N))[None, :] != 0, p, 0.0)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if HAS_WEIGHTS:
            dp += tl.where(t < unmasked[1], dweight_behind, dweight_ahead)
        ds = p * (dp - delta)
        if BIAS == LINES and HAS_TABLE_GRAD:
            line, of_slope, of_offset, by_share, by_rate = add_line_gradients(
                ds, share, distance, curve_param, knots_ptr, table_ptr, dtable_ptr, first, last, line, of_slope,
                of_offset, by_share, by_rate,
            )  # fmt: skip
        if BIAS == TABLE and HAS_TABLE_GRAD:
            ds_rows = tl.sum(ds, 1)
            dbias_behind += tl.where(t < unmasked[1], ds_rows, 0.0)
            dbias_ahead += tl.where(t < unmasked[1], 0.0, ds_rows)
        if HAS_CURVE_GRAD:
            by_slope += tl.sum(ds * curve(distance, curve_param, BIAS), 1)
            by_param += tl.sum(ds * curve_derivative(distance, curve_param, BIAS), 1)
        if HAS_SUM_GRAD:
            by_sum += tl.sum(ds if ONE_SIDED else -ds * sign(distance), 1)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    for t in range(masked[1] + masked[3] + masked[5] + masked[7]):
        start = masked_start(t, masked, BLOCK_N)
        offs_n = (start + tl.arange(0, BLOCK_N))[None, :]
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == LINES:
            scores, distance, share, first, last = add_key_lines(
                scores, k_pos_ptr, start, num_keys, q_high, inverse_span, curve_param, query_range, knots, knots_ptr,
                table_ptr, BLOCK_N,
            )  # fmt: skip
        elif BIAS != NO_BIAS:
            scores, distance = add_key_bias(
                scores, k_pos_ptr, row_ptrs, start, num_keys, q_high, q_low, offs_m, shift, slope, curve_param,
                high, low, place, min_distance, num_distances, BLOCK_N, BIAS, False, TWO_INTERVALS,
            )  # fmt: skip
        visible = visible_keys(
            offs_n, num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr, TWO_INTERVALS, HAS_KEY_MASK
        )
        p = tl.where(visible, tl.exp2(scores - lse), 0.0)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if HAS_WEIGHTS:
            dp += tl.load(dweight_ptrs + distance)
        ds = p * (dp - delta)
        if BIAS == LINES and HAS_TABLE_GRAD:
            line, of_slope, of_offset, by_share, by_rate = add_line_gradients(
                ds, share, distance, curve_param, knots_ptr, table_ptr, dtable_ptr, first, last, line, of_slope,
                of_offset, by_share, by_rate,
            )  # fmt: skip
        if BIAS == TABLE and HAS_TABLE_GRAD:
            inside = visible & valid_m[:, None]
            if USE_ROWS:  # most keys of a row are in its first or last distance
                dbias_ahead += tl.sum(tl.where(distance == 0, ds, 0.0), 1)
                dbias_behind += tl.sum(tl.where(distance == num_distances - 1, ds, 0.0), 1)
                inside &= (distance > 0) & (distance < num_distances - 1)
            tl.atomic_add(dtable_ptrs + distance, ds, mask=inside, sem="relaxed")
        if HAS_CURVE_GRAD:
            by_slope += tl.sum(ds * curve(distance, curve_param, BIAS), 1)
            by_param += tl.sum(ds * curve_derivative(distance, curve_param, BIAS), 1)
        if HAS_SUM_GRAD:
            by_sum -= tl.sum(ds * sign(distance), 1)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    if HAS_TABLE_GRAD and USE_ROWS:
        tl.store(dtable_ptrs, dbias_ahead[:, None], mask=valid_m[:, None])
        tl.store(dtable_ptrs + num_distances - 1, dbias_behind[:, None], mask=valid_m[:, None])
    elif BIAS == TABLE and HAS_TABLE_GRAD:
        tl.atomic_add(dtable_ptr, tl.sum(dbias_ahead), sem="relaxed")
        tl.atomic_add(dtable_ptr + num_distances - 1, tl.sum(dbias_behind), sem="relaxed")
    if HAS_CURVE_GRAD:
        dcurve_ptr += tl.cast(tl.program_id(0), tl.int64) * 2
        tl.store(dcurve_ptr, tl.sum(by_slope) / LOG2E if BIAS == LOG else tl.sum(by_slope))
        tl.store(dcurve_ptr + 1, tl.sum(by_param))
    if BIAS == LINES and HAS_TABLE_GRAD:
        add_to_line(dtable_ptr, line, of_slope, of_offset)
        tl.store(dcurve_ptr + tl.program_id(0), tl.sum(by_rate[:, None] * inverse_span))
        tl.store(dsums_ptr + row[:, None], by_share[:, None] / (inverse_span * LOG2E), mask=valid_m[:, None])
    if HAS_SUM_GRAD:
        tl.store(dsums_ptr + row, by_sum, mask=valid_m)
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    in_range = valid_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_range)
