"""The backward kernel of attention over key intervals for Hopper GPUs: one program per block of keys of one head.

It goes over all query heads that share the keys. Each of two warpgroups has 64 of the 128 keys, and keeps the gradients
of its keys and values in registers. Those of queries, which need all keys, are added up in memory by TMA.

What a bias learns takes sums of the gradients of scores over queries, times powers of their distance: products with a
small matrix. Where a bias is no polynomial of the distance, element by element.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from phasor.ops.attention.flash_dkdv_kernel import query_segments
from phasor.ops.attention.flash_hopper_curves import (
    add_far_curve,
    add_to_line,
    curve_form,
    curve_sums,
    line_sums,
    load_span_range,
    row_sums,
    span_sums,
)
from phasor.ops.attention.flash_hopper_tiles import (
    add_by_tma,
    add_lines,
    capped_products,
    column_powers,
    far_curve,
    has_curve,
    load_by_tma,
    load_in_pairs,
    load_sums,
    pairs_stride,
    power_of_row,
)
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LINES,
    LOG,
    LOG2E,
    NO_BIAS,
    SUMS,
    TABLE,
    curve,
    curve_derivative,
    load_slope,
    table_entries,
)


@gluon.jit
def load_queries(descs, tiles, bars, batch, spans_row, query_tiles, first_head, num_heads, stride_qh, stride_doh,
                 segments, NUM_STAGES: gl.constexpr, HAS_SPANS: gl.constexpr):  # fmt: skip
    """Load queries and what belongs to them, head by head, as soon as both warpgroups are through with those before."""
    q_desc, do_desc, lse_desc, delta_desc, spans_desc, powers_desc = descs
    q_tiles, do_tiles, lse_tiles, delta_tiles, spans_tiles, powers_tiles = tiles
    low, end, num_tiles = segments[0], segments[1], segments[2]
    head, start = first_head, low
    for t in range(num_tiles):
        stage, row = t % NUM_STAGES, batch * num_heads + head
        bar = bars.index(stage)
        mbarrier.wait(bars.index(NUM_STAGES + stage), (t // NUM_STAGES) & 1 ^ 1)
        mbarrier.expect(
            bar,
            2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            + (spans_desc.block_type.nbytes + powers_desc.block_type.nbytes if HAS_SPANS else 0),
        )
        load_by_tma(q_desc, [batch, start, head * stride_qh], bar, q_tiles.index(stage))
        load_by_tma(do_desc, [batch, start, head * stride_doh], bar, do_tiles.index(stage))
        load_by_tma(lse_desc, [row, start], bar, lse_tiles.index(stage))
        load_by_tma(delta_desc, [row, start], bar, delta_tiles.index(stage))
        if HAS_SPANS:
            load_by_tma(spans_desc, [spans_row, start], bar, spans_tiles.index(stage))
            load_by_tma(powers_desc, [spans_row * query_tiles + start // 64, 0, 0], bar, powers_tiles.index(stage))
        head += (start == end).to(gl.int32)
        start = gl.where(start == end, low, start + 64)


@gluon.jit
def biased_scores(products, factor, inverse, bias, offs_m, offs_n, start, head, far_distance, form, uses_one,
                  num_queries, num_keys, BIAS: gl.constexpr, ONE_SIDED: gl.constexpr):  # fmt: skip
    """Scores `[keys, queries]` with their bias; where it is ONE_SIDED, with that of the first query of the tile: the
    logsumexp has what others differ by.
    """
    q_pos_ptr, k_pos_ptr, stride_q, stride_k, slopes_ptr, curve_params_ptr = bias[0:6]
    table_ptr, shift, place, min_distance, num_distances, ahead = bias[6:12]
    line, last, multiple, curve_param, offset = form[1:6]
    if BIAS >= LINEAR and not has_curve(BIAS):
        slope, _ = load_slope(slopes_ptr, curve_params_ptr, head, BIAS)
        multiple = -slope
    if ONE_SIDED and BIAS == SUMS:
        k_pos_ptr += head * stride_k
        k_high, k_low = load_sums(k_pos_ptr, offs_n, num_keys)
        q_pos_ptr += head * stride_q + start
        high, low = gl.load(q_pos_ptr), gl.load(q_pos_ptr + num_queries)
        scores = products * factor - (multiple * ((high - k_high) + (low - k_low)))[:, None]
    elif ONE_SIDED:
        scores = products * factor + (multiple * (start + shift - offs_n).to(gl.float32))[:, None]
    elif BIAS == TABLE:
        table_ptr += head * (2 * pairs_stride(num_distances))
        of_tile = gl.load(table_ptr + gl.where(start < ahead, 0, num_distances - 1))
        scores = products * factor + gl.where(uses_one, of_tile, 0.0)
        if not uses_one:
            least = start + shift - place - min_distance
            if least >= 0 and least + 192 <= num_distances:
                first_entry = start + shift - offs_n - min_distance
                scores += load_in_pairs(table_ptr, first_entry, offs_m - start, num_distances)
            else:
                distance = (start + shift - offs_n)[:, None] + (offs_m - start)[None, :]
                scores += gl.load(table_ptr + table_entries(distance, min_distance, num_distances))
    else:
        if has_curve(BIAS) and uses_one:  # the products have the rest of the curve
            own = (multiple * far_curve(far_distance, curve_param, 1, BIAS)[0])[:, None]
            scores = products * factor + (offset + own * inverse if BIAS == LINES else own)
        else:
            distance = far_distance[:, None] + (offs_m - start - 32).to(gl.float32)[None, :]
            if BIAS == LINES:
                lines = table_ptr + head * num_distances, bias[13], line, last
                scores = add_lines(
                    products * factor, start + shift - offs_n, offs_m - start, 1, curve_param, inverse, lines
                )
            else:
                scores = products * factor + multiple * curve(distance, curve_param, BIAS)
    return scores


@gluon.jit
def accumulate(keys, tiles, bars, ds_tile, dq_tiles, dq_desc, bias, segments, mask, sums, out, batch, first_head,
               first_key_index, num_queries, num_keys, num_heads, num_kv_heads, scale, softcap, GROUP: gl.constexpr,
               HEAD_DIM: gl.constexpr, NUM_STAGES: gl.constexpr, BIAS: gl.constexpr, NUM_KNOTS: gl.constexpr,
               ONE_SIDED: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_KEY_MASK: gl.constexpr,
               HAS_TABLE_GRAD: gl.constexpr, HAS_CURVE_GRAD: gl.constexpr, HAS_SUM_GRAD: gl.constexpr):  # fmt: skip
    """The gradients of one warpgroup's 64 keys, those of number GROUP, and of half the features of all queries."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM // 2, 16])
    moments_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    HALF: gl.constexpr = HEAD_DIM // 2
    HAS_BIAS_GRAD: gl.constexpr = HAS_TABLE_GRAD or HAS_CURVE_GRAD or HAS_SUM_GRAD
    HAS_CURVE: gl.constexpr = has_curve(BIAS)
    HAS_LINE_GRAD: gl.constexpr = BIAS == LINES and HAS_TABLE_GRAD
    k_tile, v_tile = keys
    q_tiles, do_tiles, lse_tiles, delta_tiles, spans_tiles, powers_tiles = tiles
    keys_ready, ds_ready = bars.index(2 * NUM_STAGES), bars.index(2 * NUM_STAGES + 1)
    low, end, num_tiles, inner, outer, ahead, near = segments
    bounds_ptr, key_mask_ptr = mask
    dtable_ptr, dcurve_ptr, dk_sums_ptr, dspans_ptr, powers, key_powers = sums
    dk_ptr, dv_ptr = out
    shift, min_distance, num_distances = bias[7], bias[9], bias[10]
    dtype: gl.constexpr = q_tiles.dtype
    first_own = first_key_index + GROUP * 64
    offs_n = first_own + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, s_layout))
    is_real = offs_n < num_keys
    if HAS_KEY_MASK:
        is_real = gl.load(key_mask_ptr + offs_n, mask=is_real, other=0) != 0
    dk = gl.zeros([64, HEAD_DIM], gl.float32, d_layout)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, d_layout)
    zero_s = gl.zeros([64, 64], gl.float32, s_layout)
    zero_dq = gl.zeros([64, HALF], gl.float32, dq_layout)
    zero_moments = gl.zeros([64, 8], gl.float32, moments_layout)
    m_rows = gl.arange(0, 64, gl.SliceLayout(1, moments_layout))
    power = power_of_row(gl.arange(0, 8, gl.SliceLayout(0, moments_layout)))[None, :]
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    sums_a, sums_b, sums_c = (
        gl.zeros([64], gl.float32, rows),
        gl.zeros([64], gl.float32, rows),
        gl.zeros([64], gl.float32, rows),
    )
    moment_powers = powers
    if HAS_BIAS_GRAD and BIAS != LINES:
        moment_powers = powers.slice(0, 8).permute((1, 0))
    knots, of_line, near_rate = zero_s, gl.to_tensor(0), gl.to_tensor(0.0)
    if BIAS == LINES:
        knots = gl.load(bias[13] + gl.arange(0, NUM_KNOTS, gl.BlockedLayout([1], [32], [4], [0])))
    head, start, nothing = first_head, low, gl.to_tensor(0.0)
    form = (start < 0, of_line, of_line, nothing, nothing, nothing)
    if HAS_CURVE:
        span_range = load_span_range(bias, start, BIAS)
        form = curve_form(bias, knots, span_range, head, start, first_own, GROUP, BIAS)
    mbarrier.wait(keys_ready, 0)
    mbarrier.wait(bars.index(0), 0, pred=num_tiles > 0)
    q = q_tiles.index(0).reshape([64, HEAD_DIM])
    k = k_tile.index(0).reshape([128, HEAD_DIM]).slice(GROUP * 64, 64)
    products = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    if HAS_CURVE:
        if BIAS == LINES:
            powers = powers_tiles.index(0).reshape([16, 64])
        products, coefs = add_far_curve(products, powers, form, start, shift, first_own, scale, BIAS, s_layout)
        products, coefs = warpgroup_mma_wait(0, deps=(products, coefs))
    else:
        products = warpgroup_mma_wait(0, deps=(products,))
    for t in range(num_tiles):
        stage, following = t % NUM_STAGES, (t + 1) % NUM_STAGES
        # Zero, which the compiler does not know: it would keep the descriptors of all parts of tiles in registers.
        whole = t >> 30
        k_all, v_all = k_tile.index(whole).reshape([128, HEAD_DIM]), v_tile.index(whole).reshape([128, HEAD_DIM])
        k, v, ds_all = k_all.slice(GROUP * 64, 64), v_all.slice(GROUP * 64, 64), ds_tile.index(whole)
        offs_m = start + columns
        q, do = q_tiles.index(stage).reshape([64, HEAD_DIM]), do_tiles.index(stage).reshape([64, HEAD_DIM])
        dp = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        is_last = start == end
        next_head, next_start = head + is_last.to(gl.int32), gl.where(is_last, low, start + 64)
        next_range = load_span_range(bias, next_start, BIAS)
        values, factor = capped_products(products, scale, softcap, HAS_SOFTCAP)
        is_masked = (start < inner) | (start >= outer)
        uses_one = is_masked == 0  # whether one entry of a table, or a polynomial, serves the tile
        far_distance = (start + 32 + shift - offs_n).to(gl.float32)
        if BIAS == TABLE:
            uses_one = uses_one & ((start < ahead) | (start >= near))
        elif BIAS == LINEAR:
            uses_one = start < 0
        elif HAS_CURVE:
            uses_one = form[0]
        hidden = -1e9 if HAS_SOFTCAP and BIAS == NO_BIAS else float("-inf")  # of a cap, whose derivative is finite
        if BIAS != NO_BIAS:
            inverse = spans_tiles.index(stage).load(s_layout) if BIAS == LINES else factor
            scores = biased_scores(
                values, factor, inverse, bias, offs_m, offs_n, start, head, far_distance, form, uses_one,
                num_queries, num_keys, BIAS, ONE_SIDED,
            )  # fmt: skip
        else:
            scores = values
        if is_masked:
            valid_m = offs_m < num_queries
            first_key = gl.load(bounds_ptr + offs_m, mask=valid_m, other=0)
            last_key = gl.minimum(gl.load(bounds_ptr + num_queries + offs_m, mask=valid_m, other=-1), num_keys - 1)
            visible = (offs_n[:, None] >= first_key[None, :]) & (offs_n[:, None] <= last_key[None, :])
            scores = gl.where(visible, scores, hidden)
        if HAS_KEY_MASK:
            scores = gl.where(is_real[:, None], scores, hidden)
        lse = lse_tiles.index(stage).load(s_layout)
        p = gl.exp2(scores * factor - lse) if BIAS == NO_BIAS else gl.exp2(scores - lse)
        p_operand = gl.convert_layout(p.to(dtype), p_layout)
        if HAS_SOFTCAP and BIAS == NO_BIAS:
            p *= 1.0 - scores * scores
        dv = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp, p_operand = warpgroup_mma_wait(1, deps=(dp, p_operand))
        ds = p * (dp - delta_tiles.index(stage).load(s_layout))
        if HAS_SOFTCAP and BIAS != NO_BIAS:
            ds *= 1.0 - values * values
        ds_operand = gl.convert_layout(ds.to(dtype), p_layout)
        dv, ds_operand = warpgroup_mma_wait(0, deps=(dv, ds_operand))
        mbarrier.wait(bars.index(NUM_STAGES + (t - 1) % NUM_STAGES), ((t - 1) // NUM_STAGES) & 1, pred=t > 0)
        ds_all.slice(GROUP * 64, 64).store(gl.convert_layout(ds_operand, s_layout))
        fence_async_shared()
        mbarrier.arrive(ds_ready, count=1)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        moments, of_queries = zero_moments, zero_moments
        if HAS_LINE_GRAD:
            with_spans = powers_tiles.index(stage).reshape([16, 64]).slice(0, 8).permute((1, 0))
            moments = warpgroup_mma(ds_operand, with_spans, zero_moments, use_acc=False, is_async=True)
        elif HAS_BIAS_GRAD:
            moments = warpgroup_mma(ds_operand, moment_powers, zero_moments, use_acc=False, is_async=True)
        mbarrier.wait(ds_ready, t & 1)
        if HAS_LINE_GRAD and GROUP == 0:
            of_keys = key_powers.slice(0, 8).permute((1, 0))
            of_queries = warpgroup_mma(ds_all.permute((1, 0)), of_keys, zero_moments, use_acc=False, is_async=True)
        k_half = k_all.slice(GROUP * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_all.permute((1, 0)), k_half, zero_dq, use_acc=False, is_async=True)
        next_form = form
        if HAS_CURVE:  # what it loads is there by the time of the next products
            known_head = gl.minimum(next_head, num_heads - 1)
            next_form = curve_form(bias, knots, next_range, known_head, next_start, first_own, GROUP, BIAS)
        if HAS_BIAS_GRAD:
            dq, dk, ds_operand, moments, of_queries = warpgroup_mma_wait(
                0, deps=(dq, dk, ds_operand, moments, of_queries)
            )
        else:
            dq, dk, ds_operand = warpgroup_mma_wait(0, deps=(dq, dk, ds_operand))
        mbarrier.arrive(bars.index(NUM_STAGES + stage), count=1)
        # The next products, in vain after the last tile, beside which the gradients of queries are stored.
        mbarrier.wait(bars.index(following), ((t + 1) // NUM_STAGES) & 1, pred=t + 1 < num_tiles)
        next_q = q_tiles.index(following).reshape([64, HEAD_DIM])
        products = warpgroup_mma(k, next_q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if HAS_CURVE:
            if BIAS == LINES:
                powers = powers_tiles.index(following).reshape([16, 64])
            products, coefs = add_far_curve(
                products, powers, next_form, next_start, shift, first_own, scale, BIAS, s_layout
            )
        dq_tile = dq_tiles.index(GROUP * 2 + t % 2)
        tma.store_wait(1)
        dq_tile.reshape([64, HALF]).store(dq)
        fence_async_shared()
        add_by_tma(dq_desc, [batch, start, head * HEAD_DIM + GROUP * HALF], dq_tile)
        if HAS_LINE_GRAD:
            lines = bias[6] + head * num_distances, dtable_ptr + head * num_distances
            line, slope, rate = form[1], form[3], form[4]
            if uses_one:
                if line != of_line:
                    add_to_line(lines[1], of_line, sums_a, sums_b)
                    sums_a, sums_b = sums_a * 0.0, sums_b * 0.0
                of_line = line
                of_a, of_b = curve_sums(moments, start + 32 + shift - first_own - m_rows, rate, power, BIAS)
                sums_a += row_sums(of_a, rows)
                sums_b += row_sums(gl.where(power == 4, moments, 0.0), rows)
                sums_c += row_sums(of_b, rows) * slope
                if GROUP == 0:
                    own_queries = start + m_rows
                    own = span_sums(of_queries, own_queries + shift - first_key_index - 64, rate, power, BIAS)
                    dspans = dspans_ptr + head * num_queries + own_queries
                    gl.atomic_add(dspans, own * (slope / LOG2E), mask=own_queries < num_queries, sem="relaxed")
            else:
                first_distance = start + shift - first_own
                pointers = lines[0], lines[1], bias[13], dspans_ptr + head * num_queries + start
                near_rate += line_sums(
                    ds_tile, spans_tiles.index(stage), first_distance, num_queries - start, rate, pointers, line,
                    form[2], GROUP * 64,
                )  # fmt: skip
        elif HAS_TABLE_GRAD or (HAS_CURVE_GRAD and not ONE_SIDED):  # noqa: SIM102 (the second is unknown to compilers)
            if uses_one == 0:  # element by element
                ds_values = ds_all.slice(GROUP * 64, 64).load(s_layout).to(gl.float32)  # which the next tile overwrites
                if BIAS == TABLE:
                    entries = table_entries((offs_m + shift)[None, :] - offs_n[:, None], min_distance, num_distances)
                    inside = (entries > 0) & (entries < num_distances - 1)  # the first and the last are of many pairs
                    dentries = dtable_ptr + head * num_distances
                    gl.atomic_add(dentries + entries, ds_values, mask=inside, sem="relaxed")
                    sums_a += gl.sum(gl.where(entries == 0, ds_values, 0.0), 1)
                    sums_b += gl.sum(gl.where(entries == num_distances - 1, ds_values, 0.0), 1)
                else:
                    curve_param = form[4]
                    # From integers, so that the compiler does not keep those of the scores for it.
                    distance = ((start + shift - offs_n)[:, None] + columns[None, :]).to(gl.float32)
                    sums_a += gl.sum(ds_values * curve(distance, curve_param, BIAS), 1)
                    sums_b += gl.sum(ds_values * curve_derivative(distance, curve_param, BIAS), 1)
        if HAS_SUM_GRAD:
            sums_a -= row_sums(gl.where(power == 0, moments, 0.0), rows)
        elif HAS_TABLE_GRAD and BIAS == TABLE:
            of_tile = row_sums(gl.where((power == 0) & uses_one, moments, 0.0), rows)
            sums_a += gl.where(start < ahead, of_tile, 0.0)
            sums_b += gl.where(start < ahead, 0.0, of_tile)
        elif HAS_CURVE_GRAD and (BIAS != LINEAR or ONE_SIDED):  # noqa: SIM102 (the next is not known to compilers)
            if uses_one or ONE_SIDED:
                of_a, of_b = curve_sums(moments, start + 32 + shift - first_own - m_rows, form[4], power, BIAS)
                sums_a += row_sums(of_a, rows)
                sums_b += row_sums(of_b, rows)
        if HAS_BIAS_GRAD:  # noqa: SIM102 (the next is not known to compilers)
            if is_last:
                part = gl.program_id(0) * 2 + GROUP
                if HAS_SUM_GRAD:
                    gl.store(dk_sums_ptr + head * num_keys + offs_n, sums_a, mask=offs_n < num_keys)
                elif HAS_LINE_GRAD:
                    add_to_line(dtable_ptr + head * num_distances, of_line, sums_a, sums_b)
                    gl.store(dcurve_ptr + head * gl.num_programs(0) * 2 + part, gl.sum(sums_c, 0) + near_rate)
                    near_rate = near_rate * 0.0
                elif HAS_TABLE_GRAD:
                    dtable_row = dtable_ptr + head * num_distances
                    gl.atomic_add(dtable_row, gl.sum(sums_a, 0), sem="relaxed")
                    gl.atomic_add(dtable_row + num_distances - 1, gl.sum(sums_b, 0), sem="relaxed")
                else:
                    dcurve_of_head = dcurve_ptr + (head * gl.num_programs(0) * 2 + part) * 2
                    by_slope = gl.sum(sums_a, 0)
                    gl.store(dcurve_of_head, by_slope / LOG2E if BIAS == LOG else by_slope)
                    gl.store(dcurve_of_head + 1, gl.sum(sums_b, 0))
                sums_a, sums_b, sums_c = sums_a * 0.0, sums_b * 0.0, sums_c * 0.0
        head, start, form = next_head, next_start, next_form
        if HAS_CURVE:
            products, coefs = warpgroup_mma_wait(0, deps=(products, coefs))
        else:
            products = warpgroup_mma_wait(0, deps=(products,))
    tma.store_wait(0)
    own_keys = first_own + gl.arange(0, 64, gl.SliceLayout(1, d_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, d_layout))
    offsets = own_keys.to(gl.int64)[:, None] * (num_kv_heads * HEAD_DIM) + offs_d[None, :]
    gl.store(dk_ptr + offsets, (dk * scale).to(dtype), mask=(own_keys < num_keys)[:, None])
    gl.store(dv_ptr + offsets, dv.to(dtype), mask=(own_keys < num_keys)[:, None])


@gluon.jit
def backward_kernel(q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, spans_desc, powers_desc, dk_ptr,
                    dv_ptr, dtable_ptr, dcurve_ptr, dk_sums_ptr, dspans_ptr, ranges_ptr, bounds_ptr, key_mask_ptr,
                    q_pos_ptr, k_pos_ptr, shifts_ptr, slopes_ptr, curve_params_ptr, table_ptr, span_ranges_ptr,
                    knots_ptr,
                    num_queries, num_keys, num_heads, group_size, min_distance, num_distances, scale, softcap,
                    stride_qh, stride_kh, stride_vh, stride_doh, stride_rangesb, stride_boundsb, stride_qposb,
                    stride_qposh, stride_kposb, stride_kposh, stride_shiftsb, stride_spansb,
                    HEAD_DIM: gl.constexpr, NUM_STAGES: gl.constexpr, BIAS: gl.constexpr, NUM_KNOTS: gl.constexpr,
                    ONE_SIDED: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_KEY_MASK: gl.constexpr,
                    HAS_TABLE_GRAD: gl.constexpr, HAS_CURVE_GRAD: gl.constexpr,
                    HAS_SUM_GRAD: gl.constexpr):  # fmt: skip
    """Gradients of keys and values, and those of queries, which are added to zeros in float32 and not scaled.

    Every program adds its part of the gradient of a bias table, `[B, blocks, H, distances]`, and stores its part of the
    sums that the gradients of slopes and of the parameter of their curve are made of, `[B, H, 2 blocks, 2]`. With
    HAS_SUM_GRAD the gradients of the sums of keys, `[B, H, Tk]`. Lines have theirs in the places of a table, those of
    the rate in that of curves as `[B, H, 2 blocks]`, and those of inverse spans are added to zeros, `[B, H, Tq]`.
    """
    BLOCK_N: gl.constexpr = 128
    dtype: gl.constexpr = q_desc.dtype
    num_kv_heads = num_heads // group_size
    block_id, kv_head, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first, row = block_id * BLOCK_N, batch.to(gl.int64)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, 64, HEAD_DIM], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, 64, HEAD_DIM], do_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], dtype)
    ds_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, 64], ds_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [4, 1, 64, HEAD_DIM // 2], dq_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, 64], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, 64], delta_desc.layout)
    # Of each stage whether it is loaded, then whether both warpgroups have read it; of keys; of gradients of scores.
    bars = gl.allocate_shared_memory(gl.int64, [2 * NUM_STAGES + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * NUM_STAGES + 2):
        mbarrier.init(bars.index(i), count=1 if i < NUM_STAGES or i == 2 * NUM_STAGES else 2)
    keys_ready = bars.index(2 * NUM_STAGES)
    fence_async_shared()
    mbarrier.expect(keys_ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_by_tma(k_desc, [batch, first, kv_head * stride_kh], keys_ready, k_tile.index(0))
    load_by_tma(v_desc, [batch, first, kv_head * stride_vh], keys_ready, v_tile.index(0))
    shift = gl.to_tensor(0)
    if BIAS != NO_BIAS and BIAS != SUMS:
        shift = gl.load(shifts_ptr + row * stride_shiftsb)
    high_key = gl.minimum(first + BLOCK_N, num_keys) - 1
    unmasked, masked = query_segments(
        ranges_ptr + row * stride_rangesb + block_id * 4, first, high_key, num_queries, shift, min_distance,
        num_distances, 64, BIAS,
    )  # fmt: skip
    low, inner, ahead, near, outer = masked[2], unmasked[0], masked[4], unmasked[2], masked[6]
    # Keys and queries past the last are in masked tiles.
    outer = gl.where(first + BLOCK_N > num_keys, inner, gl.minimum(outer, num_queries // 64 * 64))
    tiles_per_head = (masked[6] - low) // 64 + masked[7]
    segments = low, low + (tiles_per_head - 1) * 64, tiles_per_head * group_size, inner, outer, ahead, near
    if BIAS == SUMS:
        q_pos_ptr += row * stride_qposb
        k_pos_ptr += row * stride_kposb
    spans_row = gl.where(stride_spansb > 0, batch, 0)
    query_tiles = gl.cdiv(num_queries, 64)
    if BIAS == LINES:
        span_ranges_ptr += spans_row * query_tiles * 2
    bias = (q_pos_ptr, k_pos_ptr, stride_qposh, stride_kposh, slopes_ptr, curve_params_ptr, table_ptr, shift, high_key,
            min_distance, num_distances, ahead, span_ranges_ptr, knots_ptr)  # fmt: skip
    HAS_SPANS: gl.constexpr = BIAS == LINES
    powers, key_powers, spans_tiles, powers_tiles = ds_tile, ds_tile, lse_tiles, q_tiles
    if HAS_SPANS:
        spans_tiles = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, 64], spans_desc.layout)
        powers_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, 16, 64], powers_desc.layout)
        if HAS_TABLE_GRAD:
            key_powers = column_powers(BLOCK_N, dtype)
    elif HAS_TABLE_GRAD or HAS_CURVE_GRAD or HAS_SUM_GRAD or has_curve(BIAS):
        powers = column_powers(64, dtype)
    fence_async_shared()
    if HAS_KEY_MASK:
        key_mask_ptr += row * num_keys
    if HAS_TABLE_GRAD:
        dtable_ptr += (row * gl.num_programs(0) + block_id) * num_heads * num_distances
    if HAS_CURVE_GRAD:
        dcurve_ptr += row * num_heads * gl.num_programs(0) * 4
    if HAS_SPANS and HAS_TABLE_GRAD:
        dcurve_ptr += row * num_heads * gl.num_programs(0) * 2
        dspans_ptr += row * num_heads * num_queries
    if HAS_SUM_GRAD:
        dk_sums_ptr += row * num_heads * num_keys
    dk_ptr += (row * num_keys * num_kv_heads + kv_head) * HEAD_DIM
    dv_ptr += (row * num_keys * num_kv_heads + kv_head) * HEAD_DIM
    keys = k_tile, v_tile
    tiles = (q_tiles, do_tiles, lse_tiles, delta_tiles, spans_tiles, powers_tiles)
    descs = (q_desc, do_desc, lse_desc, delta_desc, spans_desc, powers_desc)
    mask, out = (bounds_ptr + row * stride_boundsb, key_mask_ptr), (dk_ptr, dv_ptr)
    sums = (dtable_ptr, dcurve_ptr, dk_sums_ptr, dspans_ptr, powers, key_powers)
    first_head = kv_head * group_size
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize([
        (accumulate, (keys, tiles, bars, ds_tile, dq_tiles, dq_desc, bias, segments, mask, sums, out, batch,
                      first_head, first, num_queries, num_keys, num_heads, num_kv_heads, scale, softcap, FIRST,
                      HEAD_DIM, NUM_STAGES, BIAS, NUM_KNOTS, ONE_SIDED, HAS_SOFTCAP, HAS_KEY_MASK, HAS_TABLE_GRAD,
                      HAS_CURVE_GRAD, HAS_SUM_GRAD)),
        (accumulate, (keys, tiles, bars, ds_tile, dq_tiles, dq_desc, bias, segments, mask, sums, out, batch,
                      first_head, first, num_queries, num_keys, num_heads, num_kv_heads, scale, softcap, SECOND,
                      HEAD_DIM, NUM_STAGES, BIAS, NUM_KNOTS, ONE_SIDED, HAS_SOFTCAP, HAS_KEY_MASK, HAS_TABLE_GRAD,
                      HAS_CURVE_GRAD, HAS_SUM_GRAD)),
        (load_queries, (descs, tiles, bars, batch, spans_row, query_tiles, first_head, num_heads, stride_qh,
                        stride_doh, segments, NUM_STAGES, HAS_SPANS)),
    ], [4, 1], [240, 24])  # fmt: skip
