"""The forward kernel of attention over key intervals for Hopper GPUs: two blocks of queries of one head per program.

Keys are visited from the last tile to the first. The matrix product of a tile's weights and values runs while the
softmax of the next tile is computed.
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

from phasor.ops.attention.flash_hopper_tiles import (
    add_lines,
    barriers,
    capped_products,
    column_powers,
    far_coefs,
    far_curve,
    has_curve,
    is_far,
    load_by_tma,
    load_in_pairs,
    load_sums,
    pairs_stride,
    tile_lines,
)
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    LOG2E,
    NO_BIAS,
    SUMS,
    TABLE,
    curve,
    key_segments,
    load_slope,
    table_entries,
)


@gluon.jit
def load_keys(descs, tiles, opened, batch, kv_head, row, stride_kh, stride_vh, segments, BLOCK_N: gl.constexpr,
              NUM_STAGES: gl.constexpr, HAS_SUMS: gl.constexpr):  # fmt: skip
    """Load keys and values, tile by tile, as soon as both warpgroups have read what lies in their place."""
    k_desc, v_desc, sums_desc = descs
    k_tiles, v_tiles, sums_tiles, _ = tiles
    _, k_ready, v_ready, k_read, v_read = opened
    last, num_tiles = segments[0], segments[1]
    for t in range(num_tiles):
        stage, phase = t % NUM_STAGES, (t // NUM_STAGES) & 1
        start, bar = last - t * BLOCK_N, k_ready.index(stage)
        mbarrier.wait(k_read.index(stage), phase ^ 1)
        mbarrier.expect(bar, k_desc.block_type.nbytes + (sums_desc.block_type.nbytes if HAS_SUMS else 0))
        load_by_tma(k_desc, [batch, start, kv_head * stride_kh], bar, k_tiles.index(stage))
        if HAS_SUMS:
            load_by_tma(sums_desc, [row, start], bar, sums_tiles.index(stage))
        mbarrier.wait(v_read.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        load_by_tma(v_desc, [batch, start, kv_head * stride_vh], v_ready.index(stage), v_tiles.index(stage))


@gluon.jit
def first_sum(bias, start, num_keys, BIAS: gl.constexpr):
    """The sum of the first key of a tile, from which the others of the tile count."""
    if BIAS == SUMS:
        ptr = bias[1] + gl.maximum(gl.minimum(start, num_keys - 1), 0)
        return gl.load(ptr), gl.load(ptr + num_keys)
    else:
        return gl.to_tensor(0.0), gl.to_tensor(0.0)


@gluon.jit
def key_column(sums_tile, first_key_sum, bias, start, columns, LAYOUT: gl.constexpr, BIAS: gl.constexpr,
               ONE_SIDED: gl.constexpr):  # fmt: skip
    """The part of the bias that keys bring, counted from the first query, `[1, keys]`; nothing unless ONE_SIDED."""
    slope, shift, place, high, low = bias[3], bias[5], bias[6], bias[7], bias[8]
    if ONE_SIDED and BIAS == SUMS:
        of_tile = slope * ((high - first_key_sum[0]) + (low - first_key_sum[1]))
        column = of_tile - slope * sums_tile.load(LAYOUT)
    elif ONE_SIDED:
        # A thread's own part of a column, 0 to 6, and one that is the same for all threads, which the compiler knows.
        first = slope * ((start - shift - place) + (columns & 6)).to(gl.float32)
        column = (first + slope * (columns & ~6).to(gl.float32))[None, :]
    else:
        column = columns
    return column


@gluon.jit
def biased_scores(products, factor, own, column, bias, offs_m, offs_n, first, start, segments, form,
                  BLOCK_N: gl.constexpr, BIAS: gl.constexpr, ONE_SIDED: gl.constexpr):  # fmt: skip
    """Scores with their bias, given by what they are times and plus, the latter by query, from zeros.

    Without what all keys of a query share, where it is ONE_SIDED. Products of far tiles have that of a curve already,
    but for what all keys of a query share.
    """
    far, line, last, inverse = form
    row_ptr, slope, curve_param, shift, min_distance, num_distances = bias[2:6] + bias[9:11]
    if ONE_SIDED:
        scores, factor = products * factor + column, gl.to_tensor(1.0)
    elif BIAS == TABLE:
        inner, outer, near, ahead, behind_bias, ahead_bias = segments[2:]
        uses_one = (start >= inner) & (start < outer) & ((start < near) | (start >= ahead))
        scores = products
        if uses_one:
            own += gl.where(start < near, behind_bias, ahead_bias)
        else:
            least = first + shift - start - BLOCK_N + 1 - min_distance
            if least >= 0 and least + BLOCK_N + 64 <= num_distances:
                first_entry = num_distances - 1 - (offs_m + shift - start - min_distance)
                scores = products * factor + load_in_pairs(row_ptr, first_entry, offs_n - start, num_distances)
            else:
                distance = (offs_m + shift - start)[:, None] - (offs_n - start)[None, :]
                entries = num_distances - 1 - table_entries(distance, min_distance, num_distances)
                scores = products * factor + gl.load(row_ptr + entries)
            factor = gl.to_tensor(1.0)
    else:
        row, scores = (offs_m + shift - start).to(gl.float32), products
        if BIAS != LINEAR and far:
            a0 = far_curve(row - BLOCK_N // 2, curve_param, 1, BIAS)[0]
            if BIAS == LINES:
                own += gl.load(row_ptr + 2 * line) * a0 * inverse + gl.load(row_ptr + 2 * line + 1)
            else:
                own -= slope * a0
        else:
            if BIAS == LINES:
                lines, first_distances = (row_ptr, bias[12], line, last), offs_m + shift - start
                scores = add_lines(
                    products * factor, first_distances, offs_n - start, -1, curve_param, inverse[:, None], lines
                )
            else:
                distance = row[:, None] - (offs_n - start).to(gl.float32)[None, :]
                scores = products * factor - slope * curve(distance, curve_param, BIAS)
            factor = gl.to_tensor(1.0)
    return scores, factor, own


@gluon.jit
def tile_weights(qk, column, m_i, l_i, bias, bounds, offs_m, offs_n, first, start, segments, form, key_mask_ptr,
                 num_keys, scale, softcap, BLOCK_N: gl.constexpr, BIAS: gl.constexpr, ONE_SIDED: gl.constexpr,
                 HAS_SOFTCAP: gl.constexpr, HAS_KEY_MASK: gl.constexpr):  # fmt: skip
    """One step of the online softmax: the weights of a tile, the running maximum and sum, and what the sums before it
    are to be multiplied by.
    """
    scores, factor = capped_products(qk, scale, softcap, HAS_SOFTCAP)
    own = l_i * 0.0
    if BIAS != NO_BIAS:
        scores, factor, own = biased_scores(
            scores, factor, own, column, bias, offs_m, offs_n, first, start, segments, form, BLOCK_N, BIAS, ONE_SIDED
        )
    inner, outer = segments[2], segments[3]
    if start < inner or start >= outer:
        first_key, last_key = bounds
        visible = (offs_n[None, :] >= first_key[:, None]) & (offs_n[None, :] <= last_key[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    if HAS_KEY_MASK:
        is_real = gl.load(key_mask_ptr + offs_n, mask=offs_n < num_keys, other=0) != 0
        scores = gl.where(is_real[None, :], scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * factor + own)
    m_finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(scores * factor + (own - m_finite)[:, None])
    alpha = gl.exp2(m_i - m_finite)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def curve_coefs(bias, knots, spans, first, start, scale, BLOCK_N: gl.constexpr, BIAS: gl.constexpr,
                dtype: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """What `column_powers` are multiplied with to add the curve of a far tile to products, and what a tile is.

    That is whether it is far, how many knots of lines lie below all its shares and below some, and inverse spans.
    """
    slope, curve_param, shift = bias[3], bias[4], bias[5]
    inverse, operand_inverse, least_inverse, most_inverse = spans
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    far, line, last = gl.to_tensor(False), gl.to_tensor(0), gl.to_tensor(0)
    coefs = gl.zeros([64, 16], dtype, operand)
    if has_curve(BIAS):
        least = first + shift - start - BLOCK_N + 1
        far = is_far(least, BLOCK_N // 2, curve_param, BIAS)
        by_row = gl.full([64, 1], 1.0, gl.float32, operand)
        if BIAS == LINES:
            line, last = tile_lines(knots, curve_param, least_inverse, most_inverse, least, least + BLOCK_N + 62)
            far = far & (last <= line)
            slope = -gl.load(bias[2] + 2 * line)
            by_row = operand_inverse[:, None]
        row = first + shift - start - BLOCK_N // 2 + gl.arange(0, 64, gl.SliceLayout(1, operand))
        slopes = by_row * gl.where(far, -slope / (scale * LOG2E), 0.0)
        distance = gl.maximum(row, 1).to(gl.float32)
        coefs = far_coefs(distance, slopes, curve_param, BLOCK_N, 0, BIAS, dtype, operand)
    return coefs, (far, line, last, inverse)


@gluon.jit
def attend(q_tile, tiles, opened, bias, segments, mask, out_ptr, lse_ptr, first, num_queries, num_keys, num_heads,
           scale, softcap, sink, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
           NUM_STAGES: gl.constexpr, BIAS: gl.constexpr, NUM_KNOTS: gl.constexpr, ONE_SIDED: gl.constexpr,
           HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_KEY_MASK: gl.constexpr):  # fmt: skip
    """The outputs of one warpgroup's 64 queries, those of number GROUP."""
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    k_tiles, v_tiles, sums_tiles, powers = tiles
    q_ready, k_ready, v_ready, k_read, v_read = opened
    bounds_ptr, key_mask_ptr = mask
    last, num_tiles = segments[0], segments[1]
    first += GROUP * 64
    offs_m = first + gl.arange(0, 64, gl.SliceLayout(1, qk_layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk_layout))
    valid_m = offs_m < num_queries
    first_key = gl.load(bounds_ptr + offs_m, mask=valid_m, other=0)
    last_key = gl.minimum(gl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1), num_keys - 1)
    bounds = (first_key, last_key)
    slope, place = bias[3], bias[6]
    m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, qk_layout))
    l_i = gl.zeros([64], gl.float32, gl.SliceLayout(1, qk_layout))
    own = l_i
    if ONE_SIDED and BIAS == SUMS:
        q_high, q_low = load_sums(bias[0], offs_m, num_queries)
        own = slope * ((q_high - bias[7]) + (q_low - bias[8]))
    elif ONE_SIDED:
        own = slope * (place - offs_m).to(gl.float32)
    if HAS_SINKS:  # as if a key with that score and no value had been seen
        m_i = sink * LOG2E - own
        l_i += 1.0
    acc = gl.zeros([64, HEAD_DIM], gl.float32, out_layout)
    zero = gl.zeros([64, BLOCK_N], gl.float32, qk_layout)
    spans = (l_i, l_i, l_i, l_i)
    knots = l_i
    if BIAS == LINES:
        own_spans = bias[11] + gl.minimum(offs_m, num_queries - 1)
        inverse = gl.load(own_spans)
        operand: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, qk_layout, 2))
        spans = (inverse, gl.convert_layout(inverse, operand), gl.min(inverse, 0), gl.max(inverse, 0))
        knots = gl.load(bias[12] + gl.arange(0, NUM_KNOTS, gl.BlockedLayout([1], [32], [4], [0])))
    q = q_tile.slice(GROUP * 64, 64)
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    offs_n = last + columns
    key_sum = first_sum(bias, last, num_keys, BIAS)
    column = key_column(sums_tiles.index(0), key_sum, bias, last, columns, qk_layout, BIAS, ONE_SIDED)
    key_sum = first_sum(bias, last - BLOCK_N, num_keys, BIAS)
    k = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM])
    coefs, form = curve_coefs(bias, knots, spans, first, last, scale, BLOCK_N, BIAS, v_tiles.dtype, qk_layout)
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if has_curve(BIAS):
        qk = warpgroup_mma(coefs, powers, qk, is_async=True)
    qk, coefs = warpgroup_mma_wait(0, deps=(qk, coefs))
    mbarrier.arrive(k_read.index(0), count=1)
    p, m_i, l_i, _ = tile_weights(
        qk, column, m_i, l_i, bias, bounds, offs_m, offs_n, first, last, segments, form, key_mask_ptr, num_keys, scale,
        softcap, BLOCK_N, BIAS, ONE_SIDED, HAS_SOFTCAP, HAS_KEY_MASK,
    )  # fmt: skip
    p = gl.convert_layout(p.to(v_tiles.dtype), p_layout)
    coefs, form = curve_coefs(bias, knots, spans, first, last - BLOCK_N, scale, BLOCK_N, BIAS, v_tiles.dtype, qk_layout)
    mbarrier.wait(k_ready.index(1 % NUM_STAGES), (1 // NUM_STAGES) & 1, pred=num_tiles > 1)
    for t in range(1, num_tiles):
        stage, before, following = t % NUM_STAGES, (t - 1) % NUM_STAGES, (t + 1) % NUM_STAGES
        start = last - t * BLOCK_N
        offs_n = start + columns
        k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
        qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if has_curve(BIAS):
            qk = warpgroup_mma(coefs, powers, qk, is_async=True)
        mbarrier.wait(v_ready.index(before), ((t - 1) // NUM_STAGES) & 1)
        v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
        acc = warpgroup_mma(p, v, acc, is_async=True)
        column = key_column(sums_tiles.index(stage), key_sum, bias, start, columns, qk_layout, BIAS, ONE_SIDED)
        key_sum = first_sum(bias, start - BLOCK_N, num_keys, BIAS)
        next_coefs, next_form = curve_coefs(
            bias, knots, spans, first, start - BLOCK_N, scale, BLOCK_N, BIAS, v_tiles.dtype, qk_layout
        )
        qk, coefs = warpgroup_mma_wait(1, deps=(qk, coefs))
        mbarrier.arrive(k_read.index(stage), count=1)
        p_next, m_i, l_i, alpha = tile_weights(
            qk, column, m_i, l_i, bias, bounds, offs_m, offs_n, first, start, segments, form, key_mask_ptr, num_keys,
            scale, softcap, BLOCK_N, BIAS, ONE_SIDED, HAS_SOFTCAP, HAS_KEY_MASK,
        )  # fmt: skip
        p_next = gl.convert_layout(p_next.to(v_tiles.dtype), p_layout)
        # Here, so that the compiler leaves the softmax before the wait for the product: it moves nothing across.
        mbarrier.wait(k_ready.index(following), ((t + 1) // NUM_STAGES) & 1, pred=t + 1 < num_tiles)
        acc, p, p_next = warpgroup_mma_wait(0, deps=(acc, p, p_next))
        mbarrier.arrive(v_read.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, out_rows)[:, None]
        p, coefs, form = p_next, next_coefs, next_form
    final = (num_tiles - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(final), ((num_tiles - 1) // NUM_STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(final).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    empty = l_i == 0.0
    # Infinite for a query that sees nothing, so that its weights come out as zeros again.
    lse = gl.where(empty, float("inf"), m_i + own + gl.log2(gl.where(empty, 1.0, l_i)))
    gl.store(lse_ptr + offs_m, lse, mask=valid_m)
    acc = acc * gl.convert_layout(1.0 / gl.where(empty, 1.0, l_i), out_rows)[:, None]
    rows = first + gl.arange(0, 64, out_rows)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    offsets = rows.to(gl.int64)[:, None] * (num_heads * HEAD_DIM) + offs_d[None, :]
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_queries)[:, None])


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, sums_desc, out_ptr, lse_ptr, bounds_ptr, key_mask_ptr, q_pos_ptr,
                   k_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr, table_ptr, spans_ptr, knots_ptr,
                   sink_logits_ptr,
                   num_queries, num_keys, num_heads, group_size, min_distance, num_distances, scale, softcap,
                   stride_qh, stride_kh, stride_vh, stride_boundsb, stride_qposb, stride_qposh, stride_kposb,
                   stride_kposh, stride_shiftsb, stride_spansb,
                   HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, BIAS: gl.constexpr,
                   NUM_KNOTS: gl.constexpr, ONE_SIDED: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                   HAS_SINKS: gl.constexpr, HAS_KEY_MASK: gl.constexpr):  # fmt: skip
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, `[B, H, Tq]`.

    A table begins with the entry of the greatest distance, so that entries follow each other as keys do.
    """
    BLOCK_M: gl.constexpr = 128
    dtype: gl.constexpr = q_desc.dtype
    blocks = gl.cdiv(num_queries, BLOCK_M)
    block_id = blocks - 1 - gl.program_id(0) // num_heads  # the last ones have most to do
    head = gl.program_id(0) % num_heads
    batch = gl.program_id(1)
    first = block_id * BLOCK_M
    q_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_M, HEAD_DIM], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    HAS_SUMS: gl.constexpr = BIAS == SUMS
    sums_tiles = v_tiles
    if HAS_SUMS:
        sums_tiles = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, BLOCK_N], sums_desc.layout)
    powers = v_tiles
    if has_curve(BIAS):
        powers = column_powers(BLOCK_N, dtype)
    opened = (
        barriers(1, 1),
        barriers(NUM_STAGES, 1),
        barriers(NUM_STAGES, 1),
        barriers(NUM_STAGES, 2),
        barriers(NUM_STAGES, 2),
    )
    fence_async_shared()
    mbarrier.expect(opened[0].index(0), q_desc.block_type.nbytes)
    load_by_tma(q_desc, [batch, first, head * stride_qh], opened[0].index(0), q_tile)
    row = batch.to(gl.int64)
    offs_m = first + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    valid_m = offs_m < num_queries
    shift = gl.to_tensor(0)
    if BIAS != NO_BIAS and BIAS != SUMS:
        shift = gl.load(shifts_ptr + row * stride_shiftsb)
    bounds_ptr += row * stride_boundsb
    _, _, _, _, unmasked, masked = key_segments(
        bounds_ptr, offs_m, valid_m, num_queries, num_keys, shift, min_distance, num_distances, BLOCK_N, BIAS, False,
        False,
    )  # fmt: skip
    low, inner, near, ahead, outer = masked[2], unmasked[0], masked[4], unmasked[2], masked[6]
    num_tiles = gl.maximum(masked[3] + (outer - inner) // BLOCK_N + masked[7], 1)
    last = low + (num_tiles - 1) * BLOCK_N
    behind_bias, ahead_bias = gl.to_tensor(0.0), gl.to_tensor(0.0)
    if BIAS == TABLE:
        table_ptr += head * (2 * pairs_stride(num_distances))
        behind_bias, ahead_bias = gl.load(table_ptr), gl.load(table_ptr + num_distances - 1)
    if BIAS == LINES:
        table_ptr += head * num_distances
        spans_ptr += row * stride_spansb
    segments = last, num_tiles, inner, outer, near, ahead, behind_bias, ahead_bias
    slope, curve_param = load_slope(slopes_ptr, curve_params_ptr, head, BIAS)
    high, low_part = gl.to_tensor(0.0), gl.to_tensor(0.0)
    if BIAS == SUMS:
        q_pos_ptr += row * stride_qposb + head * stride_qposh
        k_pos_ptr += row * stride_kposb + head * stride_kposh
        high, low_part = gl.load(q_pos_ptr + first), gl.load(q_pos_ptr + num_queries + first)
    slope, curve_param = gl.to_tensor(slope), gl.to_tensor(curve_param)
    bias = (q_pos_ptr, k_pos_ptr, table_ptr, slope, curve_param, shift, first, high, low_part, min_distance,
            num_distances, spans_ptr, knots_ptr)  # fmt: skip
    if HAS_KEY_MASK:
        key_mask_ptr += row * num_keys
    sink = gl.to_tensor(0.0)
    if HAS_SINKS:
        sink = gl.load(sink_logits_ptr + head).to(gl.float32)
    out_ptr += (row * num_queries * num_heads + head) * HEAD_DIM
    lse_ptr += (row * num_heads + head) * num_queries
    q = q_tile.reshape([BLOCK_M, HEAD_DIM])
    tiles, mask, descs = (k_tiles, v_tiles, sums_tiles, powers), (bounds_ptr, key_mask_ptr), (k_desc, v_desc, sums_desc)
    kv_head, sums_row = head // group_size, batch * num_heads + head
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (attend, (q, tiles, opened, bias, segments, mask, out_ptr, lse_ptr, first, num_queries, num_keys, num_heads,
                  scale, softcap, sink, FIRST, BLOCK_N, HEAD_DIM, NUM_STAGES, BIAS, NUM_KNOTS, ONE_SIDED, HAS_SOFTCAP,
                  HAS_SINKS, HAS_KEY_MASK)),
        (attend, (q, tiles, opened, bias, segments, mask, out_ptr, lse_ptr, first, num_queries, num_keys, num_heads,
                  scale, softcap, sink, SECOND, BLOCK_N, HEAD_DIM, NUM_STAGES, BIAS, NUM_KNOTS, ONE_SIDED, HAS_SOFTCAP,
                  HAS_SINKS, HAS_KEY_MASK)),
        (load_keys, (descs, tiles, opened, batch, kv_head, sums_row, stride_kh, stride_vh, segments, BLOCK_N,
                     NUM_STAGES, HAS_SUMS)),
    ], [4, 1], [240, 24])  # fmt: skip
