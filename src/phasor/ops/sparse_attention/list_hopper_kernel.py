"""The forward over tiles of one long block of keys for Hopper GPUs: keys come by TMA, from the first of the block on.

The matrix product of some keys' weights and values runs while the softmax of the next keys is computed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from phasor.ops.attention.flash_hopper_tiles import barriers, load_by_tma
from phasor.ops.attention.flash_tiles import LOG2E
from phasor.ops.sparse_attention.list_kernels import tile_of_program


@gluon.jit
def load_keys(descs, tiles, opened, batch, k_column, v_column, start, num_tiles, BLOCK_N: gl.constexpr,
              NUM_STAGES: gl.constexpr):  # fmt: skip
    """Load keys and values, tile by tile, as soon as both warpgroups have read what lies in their place."""
    k_desc, v_desc = descs
    k_tiles, v_tiles = tiles
    k_ready, v_ready, k_read, v_read = opened
    for t in range(num_tiles):
        stage, phase = t % NUM_STAGES, (t // NUM_STAGES) & 1
        mbarrier.wait(k_read.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        load_by_tma(k_desc, [batch, start + t * BLOCK_N, k_column], k_ready.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_read.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        load_by_tma(v_desc, [batch, start + t * BLOCK_N, v_column], v_ready.index(stage), v_tiles.index(stage))


@gluon.jit
def tile_weights(products, m_i, l_i, limit, offs_n, is_masked, factor):
    """One step of the online softmax: the weights of a tile, the running maximum and sum, and what the sums before it
    are to be multiplied by.
    """
    if is_masked:
        products = gl.where(offs_n[None, :] <= limit[:, None], products, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(products, 1) * factor)
    p = gl.exp2(products * factor - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def attend(q_tile, tiles, opened, q_ptr, pairs_ptr, out_ptr, lse_ptr, first, last, start, num_tiles, first_index,
           offset, factor, stride_qt, stride_ot, stride_os, GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
           HEAD_DIM: gl.constexpr, NUM_STAGES: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """The outputs of one warpgroup's 64 pairs, those of number GROUP."""
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    qk_rows: gl.constexpr = gl.SliceLayout(1, qk_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    k_tiles, v_tiles = tiles
    k_ready, v_ready, k_read, v_read = opened
    dtype: gl.constexpr = v_tiles.dtype
    first += GROUP * 64
    places = first + gl.arange(0, 64, gl.SliceLayout(1, row_layout))
    pairs = gl.load(pairs_ptr + places, mask=places < last, other=0)
    queries = pairs // SLOTS
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, row_layout))
    q = q_tile.slice(GROUP * 64, 64)
    q.store(gl.load(q_ptr + queries.to(gl.int64)[:, None] * stride_qt + offs_d[None, :]))
    fence_async_shared()
    offs_m = first + gl.arange(0, 64, qk_rows)
    pair = gl.load(pairs_ptr + offs_m, mask=offs_m < last, other=0)
    limit = pair // SLOTS + offset
    columns = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk_layout))
    m_i = gl.full([64], float("-inf"), gl.float32, qk_rows)
    l_i = gl.zeros([64], gl.float32, qk_rows)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
    zero = gl.zeros([64, BLOCK_N], gl.float32, qk_layout)
    mbarrier.wait(k_ready.index(0), 0)
    k = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM])
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    mbarrier.arrive(k_read.index(0), count=1)
    p, m_i, l_i, _ = tile_weights(qk, m_i, l_i, limit, columns, start + BLOCK_N > first_index + 1, factor)
    p = gl.convert_layout(p.to(dtype), p_layout)
    mbarrier.wait(k_ready.index(1 % NUM_STAGES), (1 // NUM_STAGES) & 1, pred=num_tiles > 1)
    for t in range(1, num_tiles):
        stage, before, following = t % NUM_STAGES, (t - 1) % NUM_STAGES, (t + 1) % NUM_STAGES
        k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
        qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((t - 1) // NUM_STAGES) & 1)
        v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
        acc = warpgroup_mma(p, v, acc, is_async=True)
        qk = warpgroup_mma_wait(1, deps=(qk,))
        mbarrier.arrive(k_read.index(stage), count=1)
        is_masked = start + (t + 1) * BLOCK_N > first_index + 1
        p_next, m_i, l_i, alpha = tile_weights(qk, m_i, l_i, limit, columns + t * BLOCK_N, is_masked, factor)
        p_next = gl.convert_layout(p_next.to(dtype), p_layout)
        # Here, so that the compiler leaves the softmax before the wait for the product: it moves nothing across.
        mbarrier.wait(k_ready.index(following), ((t + 1) // NUM_STAGES) & 1, pred=t + 1 < num_tiles)
        acc, p, p_next = warpgroup_mma_wait(0, deps=(acc, p, p_next))
        mbarrier.arrive(v_read.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, acc_rows)[:, None]
        p = p_next
    final = (num_tiles - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(final), ((num_tiles - 1) // NUM_STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(final).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.store(lse_ptr + pair, m_i + gl.log2(l_i), mask=offs_m < last)
    acc = acc * gl.convert_layout(1.0 / l_i, acc_rows)[:, None]
    out = gl.convert_layout(acc.to(dtype), row_layout)
    places = first + gl.arange(0, 64, gl.SliceLayout(1, row_layout))
    pairs = gl.load(pairs_ptr + places, mask=places < last, other=0)
    queries = pairs // SLOTS
    offsets = queries.to(gl.int64) * stride_ot + (pairs - queries * SLOTS) * stride_os
    gl.store(out_ptr + offsets[:, None] + offs_d[None, :], out, mask=(places < last)[:, None])


@gluon.jit
def block_hopper_kernel(k_desc, v_desc, q_ptr, out_ptr, lse_ptr, pairs_ptr, spans_ptr, entries_ptr,
                        num_queries, num_heads, group_size, num_tiles, offset, scale, stride_qb, stride_qt, stride_qh,
                        stride_kh, stride_vh, stride_ob, stride_ot, stride_oh, stride_os,
                        stride_pairs, stride_spans, stride_entries,
                        HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK: gl.constexpr,
                        SLOTS: gl.constexpr, NUM_STAGES: gl.constexpr):  # fmt: skip
    """As `list_forward_kernel`, causal, for tiles of one block."""
    dtype: gl.constexpr = k_desc.dtype
    head, batch, row, first, last, begin, middle, end = tile_of_program(spans_ptr, num_tiles, num_heads, stride_spans)
    if end == begin:
        return
    start = gl.load(entries_ptr + row * stride_entries + begin) * BLOCK
    pairs_ptr += row * stride_pairs
    num_tiles, first_index = BLOCK // BLOCK_N, start + BLOCK
    if begin == middle:  # the queries' own block, which they are neighbors in
        first_index = gl.load(pairs_ptr + first) // SLOTS + offset
        last_index = gl.load(pairs_ptr + (last - 1)) // SLOTS + offset
        num_tiles = (last_index - start) // BLOCK_N + 1
    shared_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], shared_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    opened = barriers(NUM_STAGES, 1), barriers(NUM_STAGES, 1), barriers(NUM_STAGES, 2), barriers(NUM_STAGES, 2)
    fence_async_shared()
    q_ptr += batch * stride_qb + head * stride_qh
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += row * num_queries * SLOTS
    tiles, descs, factor = (k_tiles, v_tiles), (k_desc, v_desc), scale * LOG2E
    batch_index, kv_head = batch.to(gl.int32), (head // group_size).to(gl.int32)
    k_column, v_column = kv_head * stride_kh, kv_head * stride_vh
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (attend, (q_tile, tiles, opened, q_ptr, pairs_ptr, out_ptr, lse_ptr, first, last, start, num_tiles, first_index,
                  offset, factor, stride_qt, stride_ot, stride_os, FIRST, BLOCK_N, HEAD_DIM, NUM_STAGES, SLOTS)),
        (attend, (q_tile, tiles, opened, q_ptr, pairs_ptr, out_ptr, lse_ptr, first, last, start, num_tiles, first_index,
                  offset, factor, stride_qt, stride_ot, stride_os, SECOND, BLOCK_N, HEAD_DIM, NUM_STAGES, SLOTS)),
        (load_keys, (descs, tiles, opened, batch_index, k_column, v_column, start, num_tiles, BLOCK_N, NUM_STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
