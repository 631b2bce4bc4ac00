"""What the kernels of attention for Hopper GPUs share: barriers, sums, and biases that are polynomials in far tiles.

These kernels are written in Gluon, the language of Triton in which a program says itself where data lies and which
warps do what: one warp loads tiles by TMA, two warpgroups multiply them, and the softmax of one runs beside the
products of the other.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from phasor.ops.attention.flash_tiles import LINES, LOG, LOG2E, POWER, fast_tanh, log2

if hasattr(tma, "async_load"):  # since Triton 3.8
    load_by_tma, add_by_tma = tma.async_load, tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    load_by_tma = tma.async_copy_global_to_shared

    @builtin
    def add_by_tma(desc, coord, tile, _semantic=None):
        """Add a tile of shared memory to one in global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, tile.handle)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """As many barriers in shared memory, each of which opens after some arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def load_sums(ptr, offs, limit):
    """Sums at some offsets, each as a float and the rest that it rounds away."""
    inside = offs < limit
    return gl.load(ptr + offs, mask=inside, other=0.0), gl.load(ptr + limit + offs, mask=inside, other=0.0)


@gluon.jit
def load_in_pairs(row_ptr, first_entry, columns, num_entries):
    """Entries of a table for consecutive columns, given by row that of column 0; two at a time, as a thread has them.

    The table lies there twice, the second time without its first entry: either has any pair at a multiple of 8 bytes.
    """
    odd = first_entry & 1
    first = row_ptr + (odd * pairs_stride(num_entries) + (first_entry - odd))
    # A thread's own part of a column, 0 to 6, and one that is the same for all threads, which the compiler knows.
    ptrs = (first[:, None] + (columns & 6)[None, :]) + (columns & ~6)[None, :]
    return gl.load(gl.max_contiguous(gl.multiple_of(ptrs, [4, 8]), [1, 2]))


@gluon.jit
def pairs_stride(num_entries):
    """How many entries lie between a table and its second copy."""
    return (num_entries + 1) // 2 * 2


@gluon.jit
def capped_products(qk, scale, softcap, HAS_SOFTCAP: gl.constexpr):
    """Products of queries and keys, or their tanh, and what they are multiplied by to be scores to base 2."""
    if HAS_SOFTCAP:
        return fast_tanh(qk * (scale / softcap)), softcap * LOG2E
    else:
        return qk, scale * LOG2E


@gluon.constexpr_function
def has_curve(bias):
    """Whether a bias is a curve of the distance: a logarithm, a power, or lines of a logarithm."""
    return bias in (LINES, LOG, POWER)


@gluon.jit
def is_far(least, WIDTH: gl.constexpr, curve_param, BIAS: gl.constexpr):
    """Whether a curve of distances that are at least so large is, over WIDTH of them, a polynomial of degree 3.

    The variable is at most 1 / 16, where the next term of a logarithm is below 6e-6; over twice as many below 9e-5.
    """
    middle = (least + WIDTH // 2).to(gl.float32)
    if BIAS == POWER:
        return (least > 0) & (middle >= 8 * WIDTH)
    else:
        return (least > 0) & (1.0 + curve_param * middle >= 8 * WIDTH * curve_param)


@gluon.jit
def far_curve(distance, curve_param, UNIT: gl.constexpr, BIAS: gl.constexpr):
    """The curve at a distance `d + UNIT x` as `a0 + a1 x + a2 x^2 + a3 x^3`; then u and g, the inverse scale of x."""
    if BIAS == POWER:
        u = distance
        g = UNIT / distance
        a0 = gl.exp2(curve_param * log2(distance))
        a1 = curve_param * a0 * g
        c2 = curve_param * (curve_param - 1.0) * 0.5 * a0
        c3 = c2 * (curve_param - 2.0) * (1.0 / 3.0)
    else:
        u = 1.0 + curve_param * distance
        g = UNIT * curve_param / u
        a0 = log2(u)
        a1, c2, c3 = LOG2E * g, -0.5 * LOG2E, LOG2E / 3.0
    square = g * g
    return a0, a1, c2 * square, c3 * (square * g), u, g


@gluon.jit
def tile_lines(knots, rate, least_inverse, most_inverse, first_distance, last_distance):
    """How many knots lie below all shares of a tile with distances from first to last, and how many below some."""
    near = gl.maximum(gl.maximum(first_distance, -last_distance), 0).to(gl.float32)
    far = gl.maximum(last_distance, -first_distance).to(gl.float32)
    low, high = log2(1.0 + rate * near) * least_inverse, log2(1.0 + rate * far) * most_inverse
    return gl.sum((knots <= low).to(gl.int32), 0), gl.sum((knots < high).to(gl.int32), 0)


@gluon.jit
def add_lines(scores, rows, columns, STEP: gl.constexpr, rate, inverse, lines):
    """Scores with their bias, of distances that begin by row and change by STEP from column to column.

    `lines` points to the lines of the head and to knots, of which all shares lie above those before `line`, and below
    those from `last` on.
    """
    lines_ptr, knots_ptr, line, last = lines
    share = log2(1.0 + rate * gl.abs(rows[:, None] + STEP * columns[None, :]).to(gl.float32)) * inverse
    scores += gl.load(lines_ptr + 2 * line) * share + gl.load(lines_ptr + 2 * line + 1)
    for knot in range(line, last):
        begin = rows + (knot >> 30)  # by zero: the compiler would keep all shares in registers
        share_above = log2(1.0 + rate * gl.abs(begin[:, None] + STEP * columns[None, :]).to(gl.float32)) * inverse
        bend = gl.load(lines_ptr + 2 * knot + 2) - gl.load(lines_ptr + 2 * knot)
        scores += bend * gl.maximum(share_above - gl.load(knots_ptr + knot), 0.0)
    return scores


@gluon.jit
def column_powers(WIDTH: gl.constexpr, dtype: gl.constexpr):
    """The columns of a tile, counted from its middle in halves of its width, to the powers 0 to 3: `[16, WIDTH]`.

    Squares are two rows, a number and the rest that it rounds away, as all but cubes may be in `powers_of_spans`. Row 5
    is of ones. Rows 8 and 9 are the columns and their squares again, for the rests of `far_coefs`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    x = (gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :] - WIDTH // 2).to(gl.float32) * (2.0 / WIDTH)
    power = power_of_row(row)
    value = gl.where(power == 0, 1.0, x) * gl.where(power > 1, x, 1.0) * gl.where(power > 2, x, 1.0)
    value = gl.where(power > 3, (row == 5).to(gl.float32), value)
    rounded = value.to(dtype)
    rest = (value - rounded.to(gl.float32)).to(dtype)
    tile = gl.allocate_shared_memory(dtype, [16, WIDTH], gl.NVMMASharedLayout.get_default_for([16, WIDTH], dtype))
    tile.store(gl.where((row == 3) | (row == 6) | (row == 7), rest, rounded))
    return tile


@gluon.jit
def power_of_row(row):
    """Which power the rows of `column_powers` are; 4 for the one of ones, and for those of zeros."""
    power = gl.where(row < 3, row, gl.where(row < 6, row - 1, gl.where(row < 8, 7 - row, row - 7)))
    return gl.where(row < 10, power, 4)


@gluon.jit
def far_coefs(distance, slope, curve_param, WIDTH: gl.constexpr, Q_DIM: gl.constexpr, BIAS: gl.constexpr,
              dtype: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """What `column_powers` are multiplied with to be the curve times slopes, which may be by row, but for its value in
    the middle column, where distances are those given by row: `[rows, 16]`.

    They grow along columns where queries are along dimension 1.
    """
    row = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    UNIT: gl.constexpr = WIDTH // 2 if Q_DIM == 1 else -WIDTH // 2
    _, a1, a2, a3, _, _ = far_curve(distance, curve_param, UNIT, BIAS)
    power = power_of_row(row)
    value = gl.where(power == 1, a1[:, None], gl.where(power == 2, a2[:, None], a3[:, None])) * slope
    value = gl.where((power == 0) | (power == 4), 0.0, value)
    rounded = value.to(dtype)
    return gl.where(row < 8, rounded, (value - rounded.to(gl.float32)).to(dtype))
