"""The gradients of keys and values over lists: one program per part of a key block, over the queries that see it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import LOG2E, load_tile
from phasor.ops.sparse_attention.list_kernels import gather_tile, load_pairs


@triton.jit
def list_dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                     pairs_ptr, block_spans_ptr, block_entries_ptr,
                     num_queries, num_keys, num_heads, group_size, offset, scale,
                     stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                     stride_dob, stride_dot, stride_doh, stride_dkb, stride_dkt, stride_dkh,
                     stride_pairs, stride_block_spans, stride_block_entries,
                     HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     BLOCK: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
                     ONE_BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of keys and values, summed over the query heads that share them.

    Where tiles are of ONE_BLOCK, all that see a block are one span of pairs; else a list of tiles.
    """
    parts, num_kv_heads = tl.cdiv(num_keys, BLOCK_N), num_heads // group_size
    pid = tl.program_id(0)
    start = pid % parts * BLOCK_N
    kv_head = pid // parts % num_kv_heads
    batch = (pid // parts // num_kv_heads).to(tl.int64)
    offs_n = start + tl.arange(0, BLOCK_N)
    q_ptr += batch * stride_qb
    do_ptr += batch * stride_dob
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    k = load_tile(k_ptr, start, stride_kt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
    v = load_tile(v_ptr, start, stride_vt, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, False)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(group_size):
        head = kv_head * group_size + g
        row = batch * num_heads + head
        spans_ptr = block_spans_ptr + row * stride_block_spans + start // BLOCK * 3
        begin, middle, end = tl.load(spans_ptr), tl.load(spans_ptr + 1), tl.load(spans_ptr + 2)
        for t in range(begin, end, BLOCK_M if ONE_BLOCK else 1):
            if ONE_BLOCK:
                first, last = t, end
            else:
                first = tl.load(block_entries_ptr + row * stride_block_entries + t) * BLOCK_M
                last = first + BLOCK_M
            _, valid, query = load_pairs(pairs_ptr + row * stride_pairs, first, last, SLOTS, BLOCK_M)
            q = gather_tile(q_ptr + head * stride_qh, query, stride_qt, valid, BLOCK_D, HEAD_DIM)
            lse = tl.load(lse_ptr + row * num_queries + query, mask=valid, other=float("inf"))[None, :]
            delta = tl.load(delta_ptr + row * num_queries + query, mask=valid, other=0.0)[None, :]
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E) - lse)
            if CAUSAL:
                masked = t + BLOCK_M > middle if ONE_BLOCK else t >= middle
                hidden = masked & (offs_n[:, None] > (query + offset)[None, :])
                p = tl.where(hidden, 0.0, p)
            do = gather_tile(do_ptr + head * stride_doh, query, stride_dot, valid, BLOCK_D, HEAD_DIM)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    offs_d = tl.arange(0, BLOCK_D)
    offsets = (batch * stride_dkb + offs_n.to(tl.int64) * stride_dkt + kv_head * stride_dkh)[:, None] + offs_d[None, :]
    in_range = (offs_n < num_keys)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dk_ptr + offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_range)
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=in_range)
