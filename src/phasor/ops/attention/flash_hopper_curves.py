"""Curves of the distance in the backward kernel of attention for Hopper GPUs: their scores, and what they learn.

A curve is a logarithm, a power, or lines of a logarithm. Over far tiles it is a polynomial: products with the powers of
columns add it to scores, and give the moments that its gradients are made of.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from phasor.ops.attention.flash_hopper_tiles import far_coefs, far_curve, is_far, tile_lines
from phasor.ops.attention.flash_tiles import LINEAR, LINES, LOG2E, POWER, load_slope, log2


@gluon.jit
def curve_form(bias, knots, spans, head, start, first_key, group, BIAS: gl.constexpr):
    """How a tile has its curve: whether it is far, the first and the last line, what the curve is times, its parameter,
    and what is added. Of lines a far tile has a single one, for the keys of both groups.

    `spans` are the least and the greatest inverse span of its queries.
    """
    shift = bias[7]
    slope, curve_param = load_slope(bias[4], bias[5], head, BIAS)
    line, last = gl.to_tensor(0), gl.to_tensor(0)
    multiple, offset = gl.to_tensor(-slope), gl.to_tensor(0.0)
    if BIAS == LINES:
        least = start + shift - first_key + group * 64 - 127
        line, last = tile_lines(knots, curve_param, spans[0], spans[1], least, least + 190)
        far = is_far(least, 64, curve_param, BIAS) & (last <= line)
        line_ptr = bias[6] + head * bias[10] + 2 * line
        multiple, offset = gl.load(line_ptr), gl.load(line_ptr + 1)
    else:
        far = is_far(start + shift - first_key - 63, 64, curve_param, BIAS)
    return far, line, last, multiple, gl.to_tensor(curve_param), offset


@gluon.jit
def load_span_range(bias, start, BIAS: gl.constexpr):
    """The least and the greatest inverse span of the queries of a tile, where there are any."""
    if BIAS == LINES:
        ranges_ptr = bias[12] + start // 64 * 2
        return gl.load(ranges_ptr), gl.load(ranges_ptr + 1)
    else:
        return gl.to_tensor(0.0), gl.to_tensor(0.0)


@gluon.jit
def add_far_curve(products, powers, form, start, shift, first_key, scale, BIAS: gl.constexpr, LAYOUT: gl.constexpr):
    """The products of a tile's keys and queries with those that add the curve, where it is a far one; and what these
    are made of, which has to stay until they are there.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    middle = start + 32 + shift - first_key - gl.arange(0, 64, gl.SliceLayout(1, operand))
    own_slope = gl.where(form[0], form[3] / (scale * LOG2E), 0.0)
    distance = gl.maximum(middle, 1).to(gl.float32)
    coefs = far_coefs(distance, own_slope, form[4], 64, 1, BIAS, powers.dtype, operand)
    return warpgroup_mma(coefs, powers, products, is_async=True), coefs


@gluon.jit
def curve_sums(moments, distance, curve_param, power, BIAS: gl.constexpr):
    """From the moments of gradients of scores over the columns of a tile, by row: the sums of the gradients times the
    curve, and times its derivative by the parameter. Distances are those of the middle columns.
    """
    distance = distance.to(gl.float32)[:, None]
    if BIAS == LINEAR:
        by_slope = gl.where(power == 0, distance, gl.where(power == 1, 32.0, 0.0))
        by_param = by_slope * 0.0
    else:
        a0, a1, a2, a3, u, g = far_curve(distance, curve_param, 32, BIAS)
        by_slope = gl.where(power == 0, a0, gl.where(power == 1, a1, gl.where(power == 2, a2, a3)))
        if BIAS != POWER:  # of `(distance + 32 x) / (u + 32 curve_param x)`
            first = 32.0 / (u * u)
            by_param = gl.where(power == 1, first, gl.where(power == 2, -g * first, g * g * first))
            by_param = gl.where(power == 0, distance / u, by_param)
        else:  # a power times its logarithm
            x = gl.where(power == 1, g, gl.where(power == 2, g * g, g * g * g))
            log, c2 = log2(u) / LOG2E, curve_param * (curve_param - 1.0) * 0.5
            d3 = c2 * (curve_param - 2.0) * (1.0 / 3.0) * log + c2 - curve_param * 0.5 + 1.0 / 3.0
            c = gl.where(power == 1, curve_param * log + 1.0, gl.where(power == 2, c2 * log + curve_param - 0.5, d3))
            by_param = gl.where(power == 0, a0 * log, a0 * c * x)
    used = power < 4
    return gl.where(used, moments * by_slope, 0.0), gl.where(used, moments * by_param, 0.0)


@gluon.jit
def row_sums(x, rows: gl.constexpr):
    """The sums of moments by row, as gradients of scores lie."""
    return gl.convert_layout(gl.sum(x, 1), rows)


@gluon.jit
def add_to_line(dlines_ptr, line, of_slope, of_offset):
    """Add sums by row to the gradients of a line."""
    gl.atomic_add(dlines_ptr + 2 * line, gl.sum(of_slope, 0), sem="relaxed")
    gl.atomic_add(dlines_ptr + 2 * line + 1, gl.sum(of_offset, 0), sem="relaxed")


@gluon.jit
def line_sums(ds_tiles, inverse_tile, first_distance, num_queries, rate, pointers, line, last,
              FIRST_ROW: gl.constexpr):  # fmt: skip
    """Add the gradients of the lines and of the inverse spans of a tile, element by element; that of the rate.

    `pointers` are to the lines of the head and their gradients, the knots, and the gradients of the spans. Gradients of
    scores lie in 64 rows of a tile, keys, from FIRST_ROW on; they are read 16 rows at a time, as often as there are
    lines, to hold few.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lines_ptr, dlines_ptr, knots_ptr, dspans_ptr = pointers
    inverse, columns = inverse_tile.load(layout), gl.arange(0, 64, gl.SliceLayout(0, layout))
    distance = first_distance - gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None] + columns[None, :]
    zero = gl.zeros([16, 64], gl.float32, layout)
    of_spans, of_rate = zero, zero
    for piece in range(line, last + 1):  # the line of all shares, then what each knot adds to those above it
        whole = piece >> 30  # zero, which the compiler does not know: it would keep all rows in registers
        is_first, knot = piece == line, gl.maximum(piece - 1, 0)
        threshold = gl.where(is_first, -1.0, gl.load(knots_ptr + knot))
        multiple = gl.load(lines_ptr + 2 * piece) - gl.where(is_first, 0.0, gl.load(lines_ptr + 2 * knot))
        of_slope, of_offset = zero, zero
        for part in gl.static_range(4):
            far = gl.abs((distance + (whole - part * 16)).to(gl.float32))
            log = log2(1.0 + rate * far)
            ds = ds_tiles.index(whole).slice(FIRST_ROW + part * 16, 16).load(layout).to(gl.float32)
            ds = gl.where(log * inverse > threshold, ds, 0.0)
            of_slope += ds * log * inverse
            of_offset += ds
            of_spans += multiple * ds * log
            of_rate += multiple * ds * inverse * far * gl.exp2(-log)
        by_slope, by_offset = gl.sum(gl.sum(of_slope, 1), 0), gl.sum(gl.sum(of_offset, 1), 0)
        gl.atomic_add(dlines_ptr + 2 * piece, by_slope, sem="relaxed")
        gl.atomic_add(dlines_ptr + 2 * piece + 1, by_offset, sem="relaxed")
        if piece > line:
            gl.atomic_add(dlines_ptr + 2 * knot, -by_slope, sem="relaxed")
            gl.atomic_add(dlines_ptr + 2 * knot + 1, -by_offset, sem="relaxed")
    gl.atomic_add(dspans_ptr + columns, gl.sum(of_spans, 0) / LOG2E, mask=columns < num_queries, sem="relaxed")
    return gl.sum(gl.sum(of_rate, 1), 0)


@gluon.jit
def span_sums(moments, distance, rate, power, BIAS: gl.constexpr):
    """From the moments of gradients of scores over 128 keys, by query: the sums of the gradients times the curve."""
    a0, a1, a2, a3, _, _ = far_curve(distance.to(gl.float32)[:, None], rate, -64, BIAS)
    by_curve = gl.where(power == 0, a0, gl.where(power == 1, a1, gl.where(power == 2, a2, a3)))
    return gl.sum(gl.where(power < 4, moments * by_curve, 0.0), 1)
