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

from phasor.ops.attention.flash_tiles import LOG, LOG2E, fast_tanh

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


@gluon.jit
def is_far(least, WIDTH: gl.constexpr, curve_param, BIAS: gl.constexpr):
    """Whether a curve of distances that are at least so large is, over WIDTH of them, a polynomial of degree 3.

    The variable is at most 1 / 16, where the next term of a logarithm is below 6e-6.
    """
    middle = (least + WIDTH // 2).to(gl.float32)
    if BIAS == LOG:
        return (least > 0) & (1.0 + curve_param * middle >= 8 * WIDTH * curve_param)
    else:
        return (least > 0) & (middle >= 8 * WIDTH)


@gluon.jit
def far_curve(distance, curve_param, BIAS: gl.constexpr):
    """The curve at a distance `d + j` as `a0 + a1 j + a2 j^2 + a3 j^3`; then u and g, the inverse scale of j."""
    if BIAS == LOG:
        u = 1.0 + curve_param * distance
        g = curve_param / u
        a0, b = gl.log2(u), LOG2E
        c2, c3 = -0.5, 1.0 / 3.0
        a1 = b * g
    else:
        u = distance
        g = 1.0 / distance
        a0 = gl.exp2(curve_param * gl.log2(distance))
        b = a0
        a1 = curve_param * b * g
        c2 = curve_param * (curve_param - 1.0) * 0.5
        c3 = c2 * (curve_param - 2.0) * (1.0 / 3.0)
    return a0, a1, c2 * b * g * g, c3 * b * g * g * g, u, g


@gluon.jit
def add_far_curve(products, factor, distance, columns, middle, slope, curve_param, Q_DIM: gl.constexpr,
                  BIAS: gl.constexpr):  # fmt: skip
    """Scores of products of queries and keys, minus slope times the curve.

    Distances are given by row, for the column `middle`; they grow along columns where queries are along dimension 1.
    """
    a0, a1, a2, a3, _, _ = far_curve(distance, curve_param, BIAS)
    a0, a1, a2, a3 = -slope * a0[:, None], -slope * a1[:, None], -slope * a2[:, None], -slope * a3[:, None]
    if Q_DIM == 0:
        a1, a3 = -a1, -a3
    # A thread's own part of a column, 0 to 6, and one that is the same for all threads, which the compiler knows.
    own, rest = (columns & 6).to(gl.float32)[None, :], ((columns & ~6) - middle).to(gl.float32)[None, :]
    b0 = a0 + own * (a1 + own * (a2 + own * a3))
    b1 = a1 + own * (2.0 * a2 + own * (3.0 * a3))
    b2 = a2 + own * (3.0 * a3)
    return (products * factor + b0) + rest * (b1 + rest * (b2 + rest * a3))
