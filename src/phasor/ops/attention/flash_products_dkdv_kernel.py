"""The gradients of keys and values, and of the entries of keys' rows, in attention with products by distance."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_dkdv_kernel import query_segments
from phasor.ops.attention.flash_products_kernels import (
    end_sums,
    entries_of,
    load_ints,
    pair_bias,
    row_offsets,
    rows_from,
)
from phasor.ops.attention.flash_tiles import (
    NON_CONTIGUOUS,
    TABLE,
    load_tile,
    masked_start,
    score_tile,
    unmasked_start,
    visible_keys,
)


@triton.jit
def store_key_entries(drow_ptrs, ds, inside, HAS_SHARED: tl.constexpr):
    """Gradients of the entries of keys; HAS_SHARED where several queries, some of them padding, may have one entry."""
    if HAS_SHARED:
        tl.atomic_add(drow_ptrs, ds, mask=inside, sem="relaxed")
    else:
        tl.store(drow_ptrs, ds.to(drow_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def products_dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dkey_rows_ptr, dkey_ends_ptr,
                         rows_ptr, key_rows_ptr, key_ends_ptr, ranges_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr,
                         k_pos_ptr, shifts_ptr,
                         from_query, to_query, num_queries, num_keys, num_heads, group_size, batches,
                         first_distance, num_distances, stride_row, scale, softcap,
                         stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
                         stride_vb, stride_vt, stride_vh, stride_dob, stride_dot, stride_doh, stride_rangesb,
                         stride_boundsb, stride_qposb, stride_kposb, stride_shiftsb,
                         HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         HAS_ROWS: tl.constexpr, HAS_KEY_ROWS: tl.constexpr, HAS_ENDS: tl.constexpr,
                         HAS_SHARED: tl.constexpr, USE_SUMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                         TWO_INTERVALS: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Gradients of keys and values, summed over the query heads that share them, and of the entries of keys' rows.

    Those of the entries at the ends of rows are added up in `dkey_ends_ptr`, `[2, H, B, Tk]`. With USE_SUMS the
    gradients of keys and values are added to those of earlier launches.
    """
    blocks, num_kv_heads = tl.cdiv(num_keys, BLOCK_N), num_heads // group_size
    pid = tl.program_id(0)
    block_id, kv_head = pid % blocks, pid // blocks % num_kv_heads
    batch = (pid // blocks // num_kv_heads).to(tl.int64)
    start_n = block_id * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_pos_ptr += batch * stride_qposb
    k_pos = load_ints(k_pos_ptr + batch * stride_kposb, offs_n, num_keys)[:, None]
    shift = tl.load(shifts_ptr + batch * stride_shiftsb) if HAS_ENDS else NON_CONTIGUOUS
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    far, masked = query_segments(
        ranges_ptr + batch * stride_rangesb + block_id * 4, start_n, tl.minimum(start_n + BLOCK_N, num_keys) - 1,
        to_query, shift, first_distance, num_distances, BLOCK_M, TABLE,
    )  # fmt: skip
    first_head, num_rows = kv_head * group_size, to_query - from_query
    k_offsets = row_offsets(start_n, num_keys, stride_row, BLOCK_N)[:, None]
    bounds_ptr += batch * stride_boundsb
    q_ptr += batch * stride_qb + first_head * stride_qh
    do_ptr += batch * stride_dob + first_head * stride_doh
    lse_ptr += (batch * num_heads + first_head) * num_queries
    delta_ptr += (batch * num_heads + first_head) * num_queries
    k = load_tile(
        k_ptr + batch * stride_kb + kv_head * stride_kh, start_n, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False
    )
    v = load_tile(
        v_ptr + batch * stride_vb + kv_head * stride_vh, start_n, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False
    )
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dahead, dbehind = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    is_key = offs_n < num_keys
    is_real = is_key
    if HAS_KEY_MASK:  # far and near tiles include padding, which nobody sees
        is_real = tl.load(key_mask_ptr + offs_n, mask=is_key, other=0) != 0
    to_behind = tl.cast(num_heads, tl.int64) * batches * num_keys
    if HAS_ENDS:
        far_tiles = far[1] + far[3]
        for t in range(far_tiles * group_size):
            head, u = t // far_tiles, t % far_tiles
            start = unmasked_start(u, far, BLOCK_M, TABLE)
            offs_m = start + tl.arange(0, BLOCK_M)
            valid_m = offs_m < to_query
            q = load_tile(q_ptr + head * stride_qh, start, stride_qt, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False)
            kq = tl.dot(k, tl.trans(q), input_precision="ieee")
            scores, tanh = score_tile(kq, scale, softcap, HAS_SOFTCAP, q.dtype)
            if HAS_ROWS:
                q_row_ptr = rows_from(
                    rows_ptr, first_head + head, batch, batches, start - from_query, num_rows, stride_row, HAS_ROWS
                )
                ends = row_offsets(start, to_query, stride_row, BLOCK_M) + tl.where(u < far[1], 0, num_distances - 1)
                scores += tl.load(q_row_ptr + ends)[None, :].to(tl.float32)
            key_ends = ((first_head + head).to(tl.int64) * batches + batch) * num_keys + offs_n
            if HAS_KEY_ROWS:
                ends = key_ends + tl.where(u < far[1], 0, to_behind)
                scores += tl.load(key_ends_ptr + ends, mask=is_key, other=0.0)[:, None]
            lse = tl.load(lse_ptr + head * num_queries + offs_m, mask=valid_m, other=float("inf"))[None, :]
            delta = tl.load(delta_ptr + head * num_queries + offs_m, mask=valid_m, other=0.0)[None, :]
            p = tl.exp2(scores - lse)
            do = load_tile(do_ptr + head * stride_doh, start, stride_dot, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta)
            if HAS_KEY_ROWS:
                ds_keys = tl.sum(ds, 1)
                dahead += tl.where(u < far[1], ds_keys, 0.0)
                dbehind += tl.where(u < far[1], 0.0, ds_keys)
                if u == far_tiles - 1:
                    tl.atomic_add(dkey_ends_ptr + key_ends, dahead, mask=is_real, sem="relaxed")
                    tl.atomic_add(dkey_ends_ptr + to_behind + key_ends, dbehind, mask=is_real, sem="relaxed")
                    dahead, dbehind = dahead * 0.0, dbehind * 0.0
            if HAS_SOFTCAP:
                ds *= 1.0 - tanh * tanh
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    masked_tiles = masked[1] + masked[3] + masked[5] + masked[7]
    for t in range(masked_tiles * group_size):
        head, u = t // masked_tiles, t % masked_tiles
        start = masked_start(u, masked, BLOCK_M)
        offs_m = start + tl.arange(0, BLOCK_M)
        valid_m = offs_m < to_query
        q_row_ptr = rows_from(
            rows_ptr, first_head + head, batch, batches, start - from_query, num_rows, stride_row, HAS_ROWS
        )
        q_offsets = row_offsets(start, to_query, stride_row, BLOCK_M)[None, :]
        k_row_ptr = rows_from(
            key_rows_ptr, first_head + head, batch, batches, start_n, num_keys, stride_row, HAS_KEY_ROWS
        )
        q_pos = load_ints(q_pos_ptr, offs_m, to_query)[None, :]
        bias = pair_bias(
            q_row_ptr, k_row_ptr, q_offsets, k_offsets, q_pos, k_pos, first_distance, num_distances, HAS_ROWS,
            HAS_KEY_ROWS, 0, HAS_ENDS,
        )  # fmt: skip
        q = load_tile(q_ptr + head * stride_qh, start, stride_qt, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        kq = tl.dot(k, tl.trans(q), input_precision="ieee")
        scores, tanh = score_tile(kq, scale, softcap, HAS_SOFTCAP, q.dtype)
        first_key = tl.load(bounds_ptr + offs_m, mask=valid_m, other=0)[None, :]
        last_key = tl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1)[None, :]
        first_key2, last_key2 = first_key, last_key
        if TWO_INTERVALS:
            first_key2 = tl.load(bounds_ptr + 2 * num_queries + offs_m, mask=valid_m, other=0)[None, :]
            last_key2 = tl.load(bounds_ptr + 3 * num_queries + offs_m, mask=valid_m, other=-1)[None, :]
        visible = is_real[:, None] & visible_keys(
            offs_n[:, None], num_keys, first_key, last_key, first_key2, last_key2, key_mask_ptr, TWO_INTERVALS, False
        )
        lse = tl.load(lse_ptr + head * num_queries + offs_m, mask=valid_m, other=float("inf"))[None, :]
        delta = tl.load(delta_ptr + head * num_queries + offs_m, mask=valid_m, other=0.0)[None, :]
        p = tl.where(visible, tl.exp2(scores + bias - lse), 0.0)
        do = load_tile(do_ptr + head * stride_doh, start, stride_dot, to_query, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta)
        if HAS_KEY_ROWS:
            inside = visible
            if HAS_ENDS:
                more_ahead, more_behind, between = end_sums(ds, q_pos, k_pos, first_distance, num_distances)
                dahead, dbehind, inside = dahead + more_ahead, dbehind + more_behind, inside & between
                if u == masked_tiles - 1:
                    key_ends = ((first_head + head).to(tl.int64) * batches + batch) * num_keys + offs_n
                    tl.atomic_add(dkey_ends_ptr + key_ends, dahead, mask=is_real, sem="relaxed")
                    tl.atomic_add(dkey_ends_ptr + to_behind + key_ends, dbehind, mask=is_real, sem="relaxed")
                    dahead, dbehind = dahead * 0.0, dbehind * 0.0
            drow_ptr = rows_from(
                dkey_rows_ptr, first_head + head, batch, batches, start_n, num_keys, stride_row, HAS_KEY_ROWS
            )
            entries = entries_of(k_offsets, q_pos, k_pos, first_distance, num_distances, True, 1, HAS_ENDS)
            store_key_entries(drow_ptr + entries, ds, inside, HAS_SHARED)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    offs_d = tl.arange(0, BLOCK_D)
    offsets = ((batch * num_keys + offs_n)[:, None] * num_kv_heads + kv_head) * HEAD_DIM + offs_d[None, :]
    in_range = is_key[:, None] & (offs_d < HEAD_DIM)[None, :]
    dk = tl.where(is_real[:, None], dk * scale, 0.0)
    dv = tl.where(is_real[:, None], dv, 0.0)
    if USE_SUMS:
        dk += tl.load(dk_ptr + offsets, mask=in_range, other=0.0)
        dv += tl.load(dv_ptr + offsets, mask=in_range, other=0.0)
    tl.store(dk_ptr + offsets, dk.to(dk_ptr.dtype.element_ty), mask=in_range)
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=in_range)
