"""The gradients of keys and values: one program per block of keys of one head, over all query heads that share it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_lines import add_query_lines, load_key_range
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    NO_BIAS,
    NON_CONTIGUOUS,
    SUMS,
    TABLE,
    add_query_bias,
    clamp,
    load_place,
    load_positions,
    load_slope,
    load_tile,
    masked_start,
    round_down,
    round_up,
    score_tile,
    sign,
    table_rows,
    unmasked_start,
    visible_keys,
)


@triton.jit
def query_segments(ranges_ptr, low_key, high_key, num_queries, shift, min_distance, num_distances,
                   BLOCK_M: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Which queries a block of keys goes over, in multiples of BLOCK_M: the segments as `key_segments` gives them."""
    start, stop = tl.load(ranges_ptr), tl.load(ranges_ptr + 1)
    whole_from, whole_to = tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3)
    low = round_down(start, BLOCK_M)
    high = tl.where(stop > start, tl.maximum(round_up(stop, BLOCK_M), low), low)
    inner = clamp(round_up(whole_from, BLOCK_M), low, high)
    whole_end = tl.where(whole_to >= num_queries, round_up(num_queries, BLOCK_M), round_down(whole_to, BLOCK_M))
    outer = clamp(whole_end, inner, high)
    ahead, near = outer, outer
    if BIAS == TABLE:
        ahead = clamp(round_down(low_key + min_distance - shift + 1, BLOCK_M), inner, outer)
        near = clamp(round_up(high_key + min_distance + num_distances - 1 - shift, BLOCK_M), ahead, outer)
        ahead = tl.where(shift == NON_CONTIGUOUS, inner, ahead)
        near = tl.where(shift == NON_CONTIGUOUS, outer, near)
    unmasked = (inner, (ahead - inner) // BLOCK_M, near, (outer - near) // BLOCK_M)
    masked = (low, low * 0, low, (inner - low) // BLOCK_M, ahead, (near - ahead) // BLOCK_M,
              outer, (high - outer) // BLOCK_M)  # fmt: skip
    return unmasked, masked


@triton.jit
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dweights_ptr, dk_ptr, dv_ptr, dsums_ptr,
                ranges_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr, k_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr,
                table_ptr, spans_ptr, knots_ptr, num_queries, num_keys, num_heads, group_size, min_distance,
                num_distances, scale, softcap, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
                stride_vb, stride_vt, stride_vh, stride_dob, stride_dot, stride_doh, stride_rangesb, stride_boundsb,
                stride_qposb, stride_qposh, stride_kposb, stride_kposh, stride_shiftsb, stride_spansb, stride_dsums,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BIAS: tl.constexpr, NUM_KNOTS: tl.constexpr, ONE_SIDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                TWO_INTERVALS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_SUM_GRAD: tl.constexpr,
                USE_ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr):  # fmt: skip
    """Gradients of keys and values, summed over the query heads that share them.

    With SUMS every query head has its own positions. With HAS_SUM_GRAD, their gradients by keys are stored in two
    parts, those of the unmasked tiles and those of the masked ones.
    """
    blocks, num_kv_heads = tl.cdiv(num_keys, BLOCK_N), num_heads // group_size
    pid = tl.program_id(0)
    block_id = pid % blocks
    kv_head = pid // blocks % num_kv_heads
    batch = (pid // blocks // num_kv_heads).to(tl.int64)
    offs_n = block_id * BLOCK_N + tl.arange(0, BLOCK_N)
    shift, k_high, k_low = 0, offs_n, offs_n
    if BIAS != NO_BIAS:
        q_pos_ptr += batch * stride_qposb + kv_head * group_size * stride_qposh
        k_pos_ptr += batch * stride_kposb + kv_head * group_size * stride_kposh
        k_high, k_low = load_positions(k_pos_ptr, block_id * BLOCK_N, num_keys, BLOCK_N, BIAS)
    if BIAS != NO_BIAS and BIAS != SUMS and BIAS != LINES:
        shift = tl.load(shifts_ptr + batch * stride_shiftsb)
    if BIAS == LINES:
        knots = tl.load(knots_ptr + tl.arange(0, NUM_KNOTS))
        key_range = load_key_range(k_pos_ptr, block_id * BLOCK_N, num_keys, BLOCK_N)
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    high_key = tl.minimum(block_id * BLOCK_N + BLOCK_N, num_keys) - 1
    unmasked, masked = query_segments(
        ranges_ptr + batch * stride_rangesb + block_id * 4, block_id * BLOCK_N, high_key, num_queries,
        shift, min_distance, num_distances, BLOCK_M, BIAS,
    )  # fmt: skip
    bounds_ptr += batch * stride_boundsb
    q_ptr += batch * stride_qb + kv_head * group_size * stride_qh
    do_ptr += batch * stride_dob + kv_head * group_size * stride_doh
    lse_ptr += (batch * num_heads + kv_head * group_size) * num_queries
    delta_ptr += (batch * num_heads + kv_head * group_size) * num_queries
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    k = load_tile(k_ptr, block_id * BLOCK_N, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
    v = load_tile(v_ptr, block_id * BLOCK_N, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    by_sum = tl.zeros([BLOCK_N], tl.float32)
    dsums_ptr += (batch * num_heads + kv_head * group_size) * num_keys + offs_n
    is_real = offs_n < num_keys
    if HAS_KEY_MASK:  # unmasked tiles include padding, which nobody sees
        is_real = tl.load(key_mask_ptr + offs_n, mask=is_real, other=0) != 0
    masked_tiles = masked[1] + masked[3] + masked[5] + masked[7]
    unmasked_tiles = unmasked[1] + unmasked[3]
    for t in range(unmasked_tiles * group_size):
        head, u = t // unmasked_tiles, t % unmasked_tiles
        start = unmasked_start(u, unmasked, BLOCK_M, BIAS)
        offs_m = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + head * stride_qh, start, stride_qt, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        kq = tl.dot(k, tl.trans(q), input_precision="ieee")
        slope, curve_param = load_slope(slopes_ptr, curve_params_ptr, kv_head * group_size + head, BIAS)
        if BIAS == SUMS:
            k_high, k_low = load_positions(k_pos_ptr + head * stride_kposh, block_id * BLOCK_N, num_keys, BLOCK_N, BIAS)
        scores, tanh = score_tile(kq, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == LINES:
            scores = add_query_lines(
                scores, q_pos_ptr, spans_ptr + batch * stride_spansb, start, num_queries, k_high, curve_param,
                key_range, knots, knots_ptr, table_ptr + (kv_head * group_size + head) * num_distances, BLOCK_M,
            )  # fmt: skip
        elif BIAS >= LINEAR:
            high, low = load_place(k_pos_ptr + head * stride_kposh, high_key, num_keys, BIAS)
            scores, distance, own = add_query_bias(
                scores, q_pos_ptr + head * stride_qposh, table_ptr, start, num_queries, k_high, k_low, offs_n,
                shift, slope, curve_param, high, low, high_key, min_distance, num_distances, BLOCK_M, BIAS, ONE_SIDED,
                False,
            )  # fmt: skip
        elif BIAS == TABLE:
            far_entry = tl.where(u < unmasked[1], 0, num_distances - 1)
            row_ptrs = table_rows(
                table_ptr, batch, kv_head * group_size + head, offs_m[None, :], num_queries, num_heads, num_distances,
                USE_ROWS,
            )  # fmt: skip
            scores += tl.load(row_ptrs + far_entry)
        lse = tl.load(lse_ptr + head * num_queries + offs_m, mask=offs_m < num_queries, other=float("inf"))[None, :]
        delta = tl.load(delta_ptr + head * num_queries + offs_m, mask=offs_m < num_queries, other=0.0)[None, :]
        if ONE_SIDED:
            lse -= own[None, :]
        p = tl.exp2(scores - lse)
        do = load_tile(do_ptr + head * stride_doh, start, stride_dot, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        if HAS_WEIGHTS:
            dweight_ptrs = table_rows(
                dweights_ptr, batch, kv_head * group_size + head, offs_m[None, :], num_queries, num_heads,
                num_distances, True,
            )  # fmt: skip
            dp += tl.load(dweight_ptrs + far_entry)
        ds = p * (dp - delta)
        if HAS_SUM_GRAD:
            by_sum += tl.sum(-ds if ONE_SIDED else ds * sign(distance), 1)
            if u == unmasked_tiles - 1:
                tl.store(dsums_ptr + head * num_keys, by_sum, mask=is_real)
                by_sum = tl.zeros([BLOCK_N], tl.float32)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    for t in range(masked_tiles * group_size):
        head, u = t // masked_tiles, t % masked_tiles
        start = masked_start(u, masked, BLOCK_M)
        offs_m = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + head * stride_qh, start, stride_qt, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        kq = tl.dot(k, tl.trans(q), input_precision="ieee")
        row_ptrs = table_ptr
        slope, curve_param = load_slope(slopes_ptr, curve_params_ptr, kv_head * group_size + head, BIAS)
        if BIAS == SUMS:
            k_high, k_low = load_positions(k_pos_ptr + head * stride_kposh, block_id * BLOCK_N, num_keys, BLOCK_N, BIAS)
        scores, tanh = score_tile(kq, scale, softcap, HAS_SOFTCAP, q.dtype)
        if BIAS == LINES:
            scores = add_query_lines(
                scores, q_pos_ptr, spans_ptr + batch * stride_spansb, start, num_queries, k_high, curve_param,
                key_range, knots, knots_ptr, table_ptr + (kv_head * group_size + head) * num_distances, BLOCK_M,
            )  # fmt: skip
        elif BIAS != NO_BIAS:
            if BIAS == TABLE:
                row_ptrs = table_rows(
                    table_ptr, batch, kv_head * group_size + head, offs_m[None, :], num_queries, num_heads,
                    num_distances, USE_ROWS,
                )  # fmt: skip
            scores, distance, _ = add_query_bias(
                scores, q_pos_ptr + head * stride_qposh, row_ptrs, start, num_queries, k_high, k_low, offs_n,
                shift, slope, curve_param, 0.0, 0.0, 0, min_distance, num_distances, BLOCK_M, BIAS, False,
                TWO_INTERVALS,
            )  # fmt: skip
        valid_m = offs_m < num_queries
        first_key = tl.load(bounds_ptr + offs_m, mask=valid_m, other=0)[None, :]
        last_key = tl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1)[None, :]
        first_key2, last_key2 = first_key, last_key
        if TWO_INTERVALS:
            first_key2 = tl.load(bounds_ptr + 2 * num_queries + offs_m, mask=valid_m, other=0)[None, :]
            last_key2 = tl.load(bounds_ptr + 3 * num_queries + offs_m, mask=valid_m, other=-1)[None, :]
        visible = visible_keys(
            offs_n[:, None], num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr,
            TWO_INTERVALS, HAS_KEY_MASK,
        )  # fmt: skip
        lse = tl.load(lse_ptr + head * num_queries + offs_m, mask=valid_m, other=float("inf"))[None, :]
        delta = tl.load(delta_ptr + head * num_queries + offs_m, mask=valid_m, other=0.0)[None, :]
        p = tl.where(visible, tl.exp2(scores - lse), 0.0)
        do = load_tile(do_ptr + head * stride_doh, start, stride_dot, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        if HAS_WEIGHTS:
            dweight_ptrs = table_rows(
                dweights_ptr, batch, kv_head * group_size + head, offs_m[None, :], num_queries, num_heads,
                num_distances, True,
            )  # fmt: skip
            dp += tl.load(dweight_ptrs + distance)
        ds = p * (dp - delta)
        if HAS_SUM_GRAD:
            by_sum += tl.sum(ds * sign(distance), 1)
            if u == masked_tiles - 1:
                tl.store(dsums_ptr + stride_dsums + head * num_keys, by_sum, mask=is_real)
                by_sum = tl.zeros([BLOCK_N], tl.float32)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_keys + offs_n)[:, None] * num_kv_heads + kv_head) * HEAD_DIM + offs_d[None, :]
    in_range = (offs_n < num_keys)[:, None] & (offs_d < HEAD_DIM)[None, :]
    if HAS_KEY_MASK:
        dk = tl.where(is_real[:, None], dk, 0.0)
        dv = tl.where(is_real[:, None], dv, 0.0)
    tl.store(dk_ptr + offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_range)
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=in_range)
