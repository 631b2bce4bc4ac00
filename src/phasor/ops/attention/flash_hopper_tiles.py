"""What the kernels of attention for Hopper GPUs share: tiles of shared memory, and the bias of a tile's scores.

These kernels are written in Gluon, the language of Triton in which a program says itself where data lies and which warps
do what: one warp loads tiles by TMA, two warpgroups multiply them, and the softmax of one runs beside the products of the
other.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from phasor.ops.attention.flash_tiles import LOG, LOG2E, fast_tanh


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """As many barriers in shared memory, each of which opens after some arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def load_by_tma(desc, row, start, column, bar, tile):
    """Load a tile `[1, tokens, features]`; zeros past the last token. The barrier opens when it is there."""
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, start, column], bar, tile)


@gluon.jit
def load_sums(ptr, offs, limit):
    """Sums at some offsets, each as a float and the rest that it rounds away."""
    inside = offs < limit
    return gl.load(ptr + offs, mask=inside, other=0.0), gl.load(ptr + limit + offs, mask=inside, other=0.0)


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
    """The curve at a distance `d + j` as `a0 + b x (c1 + c2 x + c3 x^2)`, `x = g j`; then `u`, of which g is a share."""
    if BIAS == LOG:
        u = 1.0 + curve_param * distance
        g = curve_param / u
        a0, b = gl.log2(u), distance * 0.0 + LOG2E
        c1, c2, c3 = curve_param * 0.0 + 1.0, curve_param * 0.0 - 0.5, curve_param * 0.0 + 1.0 / 3.0
    else:
        u = distance
        g = 1.0 / distance
        a0 = gl.exp2(curve_param * gl.log2(distance))
        b = a0
        c1, c2 = curve_param, curve_param * (curve_param - 1.0) * 0.5
        c3 = c2 * (curve_param - 2.0) * (1.0 / 3.0)
    return a0, b, g, c1, c2, c3, u


@gluon.jit
def add_far_curve(scores, distance, columns, slope, curve_param, Q_DIM: gl.constexpr, BIAS: gl.constexpr):
    """Scores minus slope times the curve; distances, those of the middle columns, are given by row.

    They grow along `columns`, which are counted from the middle, where queries are along dimension Q_DIM 1.
    """
    a0, b, g, c1, c2, c3, _ = far_curve(distance, curve_param, BIAS)
    j = columns if Q_DIM == 1 else -columns
    x = g[:, None] * j[None, :]
    return (scores - (slope * a0)[:, None]) - ((slope * b * g)[:, None] * j[None, :]) * (c1 + x * (c2 + x * c3))
