"""The gradients of attention to near keys with a bias of counted keys: one program per block of queries of one head."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.counted_kernels import gate, interpolate, near_keys, sum_tile
from phasor.ops.attention.flash_tiles import LOG2E, load_tile, query_block, score_tile, visible_keys


@triton.jit
def add_key_gradients(dk_ptrs, dv_ptrs, in_range, p, dx, q, do, scale):
    """Add what a block of queries gives to the gradients of a tile's keys and values."""
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
    tl.atomic_add(dv_ptrs, dv, mask=in_range, sem="relaxed")
    dk = tl.dot(tl.trans(dx.to(q.dtype)), q, input_precision="ieee")
    tl.atomic_add(dk_ptrs, dk * scale, mask=in_range, sem="relaxed")


@triton.jit
def near_backward_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, dby_row_ptr,
                         by_row_ptr, starts_ptr, ends_ptr, bounds_ptr, key_mask_ptr, num_queries, num_keys, num_heads,
                         group_size, num_rows, stride_row, scale, softcap, stride_qb, stride_qt, stride_qh, stride_kb,
                         stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_dob, stride_dot, stride_doh,
                         stride_boundsb, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Gradients of queries; those of keys and values, and of products with the rows of the table, are added up.

    A gate counts for its own key and all before it, so that its gradient is a sum of theirs: what all near keys of a
    query have, known after a first pass over them, without what those after it have.
    """
    block_id, head, batch, offs_m = query_block(num_queries, num_heads, BLOCK_M)
    valid_m, offs_n, offs_d = offs_m < num_queries, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    row = (batch * num_heads + head) * num_queries
    entry = (row + tl.minimum(offs_m, num_queries - 1))[:, None] * stride_row
    row_ptrs, drow_ptrs = by_row_ptr + entry, dby_row_ptr + entry
    first_key, last_key, high, counted_tiles, other_tiles = near_keys(
        bounds_ptr + batch * stride_boundsb, starts_ptr + batch * num_queries, ends_ptr + row, offs_m, valid_m,
        num_queries, num_keys, BLOCK_N,
    )  # fmt: skip
    kv_head, num_kv_heads = head // group_size, num_heads // group_size
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    if HAS_KEY_MASK:
        key_mask_ptr += batch * num_keys
    q = load_tile(q_ptr + batch * stride_qb + head * stride_qh, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M,
                  BLOCK_D, HEAD_DIM, False)  # fmt: skip
    do = load_tile(do_ptr + batch * stride_dob + head * stride_doh, block_id * BLOCK_M, stride_dot, num_queries,
                   BLOCK_M, BLOCK_D, HEAD_DIM, False)  # fmt: skip
    lse = tl.load(lse_ptr + row + offs_m, mask=valid_m, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + row + offs_m, mask=valid_m, other=0.0)[:, None]
    limit = (num_rows - 1).to(tl.float32)
    from_key = offs_n[:, None] >= offs_n[None, :]
    after_key = offs_n[:, None] > offs_n[None, :]
    counts = tl.zeros([BLOCK_M], tl.float32)
    left = tl.zeros([BLOCK_M], tl.float32)  # the gradients of counts of keys that are not behind
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
        bias, _, _, slope = interpolate(
            row_ptrs, counts[:, None] + sum_tile(gates, from_key, q.dtype, tl.float16), limit
        )
        counts += tl.sum(gates, 1)
        scores, _ = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        p = tl.where(visible, tl.exp2(scores + bias * LOG2E - lse), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        left += tl.sum(p * (dp - delta) * slope, 1)
    counts = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dlast = tl.zeros([BLOCK_M], tl.float32)  # of the product with the last row
    first_row = batch * num_keys * num_kv_heads + kv_head
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
        positions = counts[:, None] + sum_tile(gates, from_key, q.dtype, tl.float16)
        bias, below, share, slope = interpolate(row_ptrs, positions, limit)
        counts += tl.sum(gates, 1)
        scores, tanh = score_tile(qk, scale, softcap, HAS_SOFTCAP, q.dtype)
        p = tl.where(visible, tl.exp2(scores + bias * LOG2E - lse), 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        counted = visible & (positions < limit)
        tl.atomic_add(drow_ptrs + below, ds * (1.0 - share), mask=counted, sem="relaxed")
        tl.atomic_add(drow_ptrs + below + 1, ds * share, mask=counted, sem="relaxed")
        dlast += tl.sum(tl.where(counted, 0.0, ds), 1)
        dcounts = ds * slope
        dgates = left[:, None] - sum_tile(dcounts, after_key, q.dtype, tl.bfloat16)
        left -= tl.sum(dcounts, 1)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dx = ds + dgates * gates * (1.0 - gates)
        dq = tl.dot(dx.to(k.dtype), k, dq, input_precision="ieee")
        offsets = ((first_row + (start + offs_n) * num_kv_heads) * HEAD_DIM)[:, None] + offs_d[None, :]
        in_range = (start + offs_n < num_keys)[:, None] & (offs_d < HEAD_DIM)[None, :]
        add_key_gradients(dk_ptr + offsets, dv_ptr + offsets, in_range, p, dx, q, do, scale)
    bias = tl.load(row_ptrs + num_rows - 1) * LOG2E
    for t in range(counted_tiles, counted_tiles + other_tiles):
        start = high - (t + 1) * BLOCK_N
        k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
        scores, tanh = score_tile(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, HAS_SOFTCAP, q.dtype)
        visible = visible_keys(
            (start + offs_n)[None, :], num_keys, first_key[:, None], last_key[:, None], 0, 0, key_mask_ptr, False,
            HAS_KEY_MASK,
        )  # fmt: skip
        p = tl.where(visible, tl.exp2(scores + bias - lse), 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        dlast += tl.sum(ds, 1)
        if HAS_SOFTCAP:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        offsets = ((first_row + (start + offs_n) * num_kv_heads) * HEAD_DIM)[:, None] + offs_d[None, :]
        in_range = (start + offs_n < num_keys)[:, None] & (offs_d < HEAD_DIM)[None, :]
        add_key_gradients(dk_ptr + offsets, dv_ptr + offsets, in_range, p, ds, q, do, scale)
    tl.atomic_add(drow_ptrs + num_rows - 1, dlast[:, None], mask=valid_m[:, None], sem="relaxed")
    offsets = ((batch * num_queries + offs_m)[:, None] * num_heads + head) * HEAD_DIM + offs_d[None, :]
    in_range = valid_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_range)
