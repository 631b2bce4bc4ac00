"""Rotation of queries and keys in one pass over memory, the angles made on the way from positions; in Triton.

A program takes a token: it makes the token's cosines and sines once and turns its heads by them. What it reads
and writes is told by strides, so that the heads may lie in tensors of their own or inside a fused projection.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import on_device, supports_pdl
from phasor.ops.pdl import pdl_launch, pdl_wait

LARGE = 1024  # tokens; a kernel for fewer begins while the one before it ends


class Schedule(NamedTuple):
    """How the work is cut: programs that share the heads of a token, and the warps of each.

    With `halves`, where a head turns whole and its halves are paired, each half is read and written by itself.
    Otherwise every feature is read beside its partner: angles are made twice, and heads are written whole.
    """

    parts: int
    warps: int
    halves: bool = False


def schedule_of(tokens: int, heads: int, width: int) -> Schedule:
    """The schedule for so many tokens with heads of this width."""
    if tokens >= LARGE:
        return Schedule(1, min(max(triton.next_power_of_2(heads) * triton.next_power_of_2(width) // 1024, 1), 8))
    if tokens > 256:  # enough to fill the device
        return Schedule(min(2, max(heads, 1)), 2, halves=True)
    return Schedule(min(4, max(heads, 1)), 1 if tokens > 128 else 2, halves=True)


@triton.jit
def cos_sin(position, increments):
    """Cosine and sine of a 64-bit phase, the fraction of a turn that wrapping around leaves of `position * increment`.

    The nearest quarter of a turn is taken off in whole numbers. The polynomials are those through Chebyshev's points
    of the sine and cosine of `2 pi z` for `z` of at most an eighth of a turn, wrong by less than 1e-8 each.
    """
    phase = ((position * increments) >> 32).to(tl.int32)
    quarter = (phase + 0x20000000) >> 30
    z = (phase - (quarter << 30)).to(tl.float32) * 2.3283064365386963e-10  # 2^-32, exactly
    t = z * z
    sine = z * (6.283185287812946 + t * (-41.34166257054795 + t * (81.59254287130155 + t * -75.40161270274746)))
    poly = -85.44882008965106 + t * 59.424105981756476
    cosine = 1.0 + t * (-19.739208789987508 + t * (64.93936905141977 + t * poly))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def read(source, real, WIDTH: tl.constexpr, HEAD: tl.constexpr, ADJACENT: tl.constexpr, HALVES: tl.constexpr):
    """The heads that `source` `[R, 1]` points to, as two tensors `[R, C]`: features, and those they are paired with.

    Both halves of every pair are among the first, if not ADJACENT or HALVES; the second come from the cache then.
    """
    if ADJACENT:
        both = tl.arange(0, 2 * triton.next_power_of_2((HEAD + 1) // 2))[None, :]
        x = tl.load(source + both, real & (both < HEAD))
        return tl.split(tl.reshape(x, (source.shape[0], x.shape[1] // 2, 2)))
    elif HALVES:
        first = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
        inside = real & (first < HEAD // 2)
        return tl.load(source + first, inside), tl.load(source + (HEAD // 2 + first), inside)
    else:
        column = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
        RUN: tl.constexpr = (WIDTH // 2) & -(WIDTH // 2)  # of features whose partners lie side by side too
        partner = tl.where(column < WIDTH // 2, column + WIDTH // 2, column - WIDTH // 2)
        partner = tl.max_contiguous(tl.multiple_of(partner, (1, RUN)), (1, RUN))
        return tl.load(source + column, real & (column < HEAD)), tl.load(source + partner, real & (column < WIDTH))


@triton.jit
def write(
    x, y, cos, sin, target, real,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, ADJACENT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Turn what `read` has read, and write it to the heads that `target` `[R, 1]` points to."""
    kind = target.dtype.element_ty
    x, y = x.to(tl.float32), y.to(tl.float32)
    if ADJACENT:
        a, b = x * cos - y * sin, y * cos + x * sin
        if WIDTH < HEAD:
            turns = tl.arange(0, x.shape[1])[None, :] < WIDTH // 2
            a, b = tl.where(turns, a, x), tl.where(turns, b, y)
        both = tl.arange(0, 2 * x.shape[1])[None, :]
        z = tl.reshape(tl.join(a.to(kind), b.to(kind)), (x.shape[0], 2 * x.shape[1]))
        tl.store(target + both, z, real & (both < HEAD))
    elif HALVES:
        first = tl.arange(0, x.shape[1])[None, :]
        inside = real & (first < HEAD // 2)
        tl.store(target + first, (x * cos - y * sin).to(kind), inside)
        tl.store(target + (HEAD // 2 + first), (y * cos + x * sin).to(kind), inside)
    else:
        column = tl.arange(0, x.shape[1])[None, :]
        z = x * cos + y * tl.where(column < WIDTH // 2, -sin, sin)
        tl.store(target + column, tl.where(column < WIDTH, z, x).to(kind), real & (column < HEAD))


@triton.jit(do_not_specialize=["positions", "length", "position_row", "position_step"])
def rotary_kernel(
    positions, increments, factor, q_in, k_in, v_in, q_out, k_out, v_out,
    length, position_row, position_step,
    q_row, q_step, q_group, q_head,  # strides of what is read: of a row, a token, a group of heads, a head
    k_row, k_step, k_head,
    v_row, v_step, v_head,
    Q_STEP: tl.constexpr, Q_GROUP: tl.constexpr, KV_STEP: tl.constexpr, KV_HEAD: tl.constexpr,  # of what is written
    QUERIES: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, ADJACENT: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    HALVES: tl.constexpr, PARTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Queries `[B, T, K, SHARED, D]`, keys and values `[B, T, K, D]` of a token, from `in` to `out`.

    PARTS programs share the heads of a token. BACK turns the other way, which is the gradient. With VALUES the values
    are copied along. WIDE is for heads further apart than 32 bits count. Under USE_PDL see `pdl_wait`.
    """
    HEADS: tl.constexpr = triton.next_power_of_2((QUERIES + PARTS - 1) // PARTS) if QUERIES > 0 else 1
    GROUPS: tl.constexpr = triton.next_power_of_2((KEYS + PARTS - 1) // PARTS) if KEYS > 0 else 1
    PAIRED: tl.constexpr = ADJACENT or HALVES
    token, part = tl.program_id(0), tl.program_id(1)
    head, group = part * HEADS + tl.arange(0, HEADS)[:, None], part * GROUPS + tl.arange(0, GROUPS)[:, None]
    some, every = head < QUERIES, group < KEYS
    group_of, in_group = head // SHARED, head % SHARED
    if WIDE:
        group_of, in_group, group = group_of.to(tl.int64), in_group.to(tl.int64), group.to(tl.int64)
    row, step, place = (token // length).to(tl.int64), (token % length).to(tl.int64), token.to(tl.int64)
    pdl_wait(USE_PDL)
    # All that is read is asked for before the angles are made, which take as long as reading does.
    position, scale = tl.load(positions + row * position_row + step * position_step), tl.load(factor)
    pair = tl.arange(0, triton.next_power_of_2((HEAD + 1) // 2 if PAIRED else HEAD))
    if not PAIRED:
        pair = tl.where(pair < WIDTH // 2, pair, pair - WIDTH // 2)
    increment = tl.load(increments + pair, pair < WIDTH // 2, other=0)
    q_from = q_in + row * q_row + step * q_step + group_of * q_group + in_group * q_head
    q_to = q_out + place * Q_STEP + group_of * Q_GROUP + in_group * HEAD
    q_x, q_y = read(q_from, some, WIDTH, HEAD, ADJACENT, HALVES)
    if KEYS > 0:
        k_from = k_in + row * k_row + step * k_step + group * k_head
        k_to = k_out + place * KV_STEP + group * KV_HEAD
        k_x, k_y = read(k_from, every, WIDTH, HEAD, ADJACENT, HALVES)
    cos, sin = cos_sin(position, increment)
    cos, sin = (cos * scale)[None, :], ((-sin if BACK else sin) * scale)[None, :]
    write(q_x, q_y, cos, sin, q_to, some, WIDTH, HEAD, ADJACENT, HALVES)
    if KEYS > 0:
        write(k_x, k_y, cos, sin, k_to, every, WIDTH, HEAD, ADJACENT, HALVES)
    if VALUES:
        column = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
        inside = every & (column < HEAD)
        v = tl.load(v_in + row * v_row + step * v_step + group * v_head + column, inside)
        tl.store(v_out + place * KV_STEP + group * KV_HEAD + column, v, inside)


class Launch(NamedTuple):
    """A kernel as it was compiled for tensors of certain shapes, and the numbers it is called with behind them."""

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]


MOST = 1024
KEPT: dict[tuple[Any, ...], Launch] = {}  # at most so many; Triton itself would look at every number again


def launch(
    heads: Sequence[Tensor],
    into: Sequence[Tensor],
    positions: Tensor,
    increments: Tensor,
    factor: Tensor,
    *,
    adjacent: bool,
    back: bool,
    schedule: Schedule | None = None,
) -> None:
    """Turn queries and keys `[B, T, K, D]`, and copy values of the same shape where they are given.

    Queries are `[B, T, H, D]` or, by group, `[B, T, K, H/K, D]`. What is read may have any strides, but for 1 between
    features. In what is written tokens follow one another, and so do the heads of a group; keys and values have the
    same strides.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (*heads, heads[1])[:3])
    if q.shape[0] * q.shape[1] == 0:
        return
    into_q, into_k, into_v = (*into, into[1])[:3]
    told = (
        (q.shape, q.stride(), k.shape, k.stride(), v.stride(), into_q.shape, into_q.stride(), into_k.stride()),
        (positions.shape, positions.stride(), len(increments), len(heads) == 3, adjacent, back, schedule),
    )
    tensors = positions, increments, factor, q, k, v, into_q, into_k, into_v
    addresses = increments.data_ptr() | factor.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr()
    aligned = (addresses | into_q.data_ptr() | into_k.data_ptr() | into_v.data_ptr()) % 16 == 0  # as compiled for
    key = (*told, q.dtype, k.dtype, v.dtype, q.device)
    with on_device(q):
        kept = KEPT.get(key) if aligned else None
        if kept is not None:
            kept.kernel[kept.grid](*tensors, *kept.numbers)
            return
        grid, numbers, warps = arguments(*told[0], *told[1])
        pdl = grid[0] < LARGE and supports_pdl(q.device)
        kernel = rotary_kernel[grid](*tensors, *numbers, pdl, num_warps=warps, **pdl_launch(pdl))
        if kernel is not None and aligned:  # there is none in the interpreter
            if len(KEPT) >= MOST:
                KEPT.clear()
            KEPT[key] = Launch(kernel, grid, (*numbers, pdl))


def arguments(
    q: Sequence[int],
    q_strides: Sequence[int],
    k: Sequence[int],
    k_strides: Sequence[int],
    v_strides: Sequence[int],
    into: Sequence[int],
    into_strides: Sequence[int],
    into_k: Sequence[int],
    positions: Sequence[int],
    position_strides: Sequence[int],
    pairs: int,
    values: bool,
    adjacent: bool,
    back: bool,
    schedule: Schedule | None,
) -> tuple[tuple[int, int, int], tuple[Any, ...], int]:
    """The grid, the numbers and the warps of a launch, by shapes and strides."""
    rows, length, head, keys = q[0], q[1], q[-1], k[2]
    groups, shared = next((x[2:4] for x in (q, into) if len(x) == 5), (q[2], 1))
    of_group, of_head = head_strides(q_strides, shared)
    parts, warps, halves = schedule or schedule_of(rows * length, groups * shared, head)
    halves = halves and 2 * pairs == head and not adjacent
    wide = max(of_group * groups, of_head * shared, k_strides[2] * keys, v_strides[2] * keys) >= 1 << 30
    by_row = len(positions) == 2 and positions[0] > 1
    numbers = (
        *(length, position_strides[0] if by_row else 0, position_strides[-1]),
        *(*q_strides[:2], of_group, of_head, *k_strides[:3], *v_strides[:3]),
        *(into_strides[1], head_strides(into_strides, shared)[0], into_k[1], into_k[2]),
        *(groups * shared, shared, keys, values, 2 * pairs, head, adjacent, back, wide, halves, parts),
    )
    return (rows * length, parts, 1), numbers, warps


def head_strides(strides: Sequence[int], shared: int) -> tuple[int, int]:
    """Those of a group of heads and of a head, of queries with or without an axis for groups."""
    return (strides[2], strides[3]) if len(strides) == 5 else (strides[2] * shared, strides[2])
