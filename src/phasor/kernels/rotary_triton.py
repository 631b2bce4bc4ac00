"""Rotation of queries and keys in one pass over memory, the angles made on the way from positions; in Triton.

One program takes a token: it makes the token's cosines and sines once and turns all of its heads by them. What it reads
and writes is told by strides, so that the heads may lie in tensors of their own or inside a fused projection.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NOTHING = nullcontext()


class Schedule(NamedTuple):
    """How the work is cut: tokens that a program takes one after another, and its warps."""

    tokens: int
    warps: int


def schedule_of(tokens: int, heads: int, width: int) -> Schedule:
    """The schedule for so many tokens with heads of this width: few warps make few angles twice."""
    if tokens < 1024:  # too few to fill the device: each as fast as it can be
        return Schedule(1, 4)
    return Schedule(1, min(max(triton.next_power_of_2(heads) * width // 2048, 1), 8))


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
def pairs(source, real, PAIRS: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr):
    """The first and second features of all pairs, `[R, PAIRS]`, of the `real` heads `source` `[R, 1]` points to."""
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(source + both, real & (both < WIDTH))
        return tl.split(tl.reshape(x, (source.shape[0], PAIRS, 2)))
    else:
        first = tl.arange(0, PAIRS)[None, :]
        inside = real & (first < WIDTH // 2)
        return tl.load(source + first, inside), tl.load(source + (WIDTH // 2 + first), inside)


@triton.jit
def put_turned(u, v, cos, sin, target, real, PAIRS: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr):
    """Write the turned pairs to the heads `target` `[R, 1]` points to."""
    u, v = u.to(tl.float32), v.to(tl.float32)
    a, b = (u * cos - v * sin).to(target.dtype.element_ty), (v * cos + u * sin).to(target.dtype.element_ty)
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(target + both, tl.reshape(tl.join(a, b), (target.shape[0], 2 * PAIRS)), real & (both < WIDTH))
    else:
        first = tl.arange(0, PAIRS)[None, :]
        inside = real & (first < WIDTH // 2)
        tl.store(target + first, a, inside)
        tl.store(target + (WIDTH // 2 + first), b, inside)


@triton.jit
def copy(source, target, real, SIZE: tl.constexpr):
    """Copy the SIZE features at the pointers `source` `[R, 1]`."""
    column = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    tl.store(target + column, tl.load(source + column, real & (column < SIZE)), real & (column < SIZE))


@triton.jit(do_not_specialize=["tokens", "length", "position_row", "position_step"])
def rotary_kernel(
    positions, increments, factor, tokens, length, position_row, position_step,
    q_in, k_in, v_in, q_out, k_out, v_out,
    q_row, q_step, q_group, q_head,  # strides of what is read: of a row, a token, a group of heads, a head
    k_row, k_step, k_head,
    v_row, v_step, v_head,
    Q_STEP: tl.constexpr, Q_GROUP: tl.constexpr, KV_STEP: tl.constexpr, KV_HEAD: tl.constexpr,  # of what is written
    QUERIES: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, ADJACENT: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Queries `[B, T, K, SHARED, D]`, keys and values `[B, T, K, D]` of TOKENS tokens a program, from `in` to `out`.

    BACK turns the other way, which is the gradient. With VALUES the values are copied along. WIDE is for heads further
    apart than 32 bits count.
    """
    PAIRS: tl.constexpr = triton.next_power_of_2(WIDTH // 2)
    HEADS: tl.constexpr = triton.next_power_of_2(QUERIES)
    GROUPS: tl.constexpr = triton.next_power_of_2(KEYS) if KEYS > 0 else 1
    pair = tl.arange(0, PAIRS)
    increment = tl.load(increments + pair, pair < WIDTH // 2, other=0)
    scale = tl.load(factor)
    head, group = tl.arange(0, HEADS)[:, None], tl.arange(0, GROUPS)[:, None]
    every, some = group < KEYS, head < QUERIES
    group_of, in_group = head // SHARED, head % SHARED
    if WIDE:
        group_of, in_group, group = group_of.to(tl.int64), in_group.to(tl.int64), group.to(tl.int64)
    for i in tl.static_range(TOKENS):
        token = tl.program_id(0) * TOKENS + i
        here = token < tokens
        row, step, place = (token // length).to(tl.int64), (token % length).to(tl.int64), token.to(tl.int64)
        # All that is read is asked for before the angles are made, which take as long as reading does.
        position = tl.load(positions + row * position_row + step * position_step, here, other=0)
        q_from = q_in + row * q_row + step * q_step + group_of * q_group + in_group * q_head
        q_to = q_out + place * Q_STEP + group_of * Q_GROUP + in_group * HEAD
        q_first, q_second = pairs(q_from, here & some, PAIRS, WIDTH, ADJACENT)
        if KEYS > 0:
            k_from = k_in + row * k_row + step * k_step + group * k_head
            k_to = k_out + place * KV_STEP + group * KV_HEAD
            k_first, k_second = pairs(k_from, here & every, PAIRS, WIDTH, ADJACENT)
        cos, sin = cos_sin(position, increment)
        cos, sin = (cos * scale)[None, :], ((-sin if BACK else sin) * scale)[None, :]
        put_turned(q_first, q_second, cos, sin, q_to, here & some, PAIRS, WIDTH, ADJACENT)
        if KEYS > 0:
            put_turned(k_first, k_second, cos, sin, k_to, here & every, PAIRS, WIDTH, ADJACENT)
        if WIDTH < HEAD:
            copy(q_from + WIDTH, q_to + WIDTH, here & some, HEAD - WIDTH)
            if KEYS > 0:
                copy(k_from + WIDTH, k_to + WIDTH, here & every, HEAD - WIDTH)
        if VALUES:
            v_from = v_in + row * v_row + step * v_step + group * v_head
            copy(v_from, v_out + place * KV_STEP + group * KV_HEAD, here & every, HEAD)


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
    """Turn queries `[B, T, K, H/K, D]` and keys `[B, T, K, D]`, and copy values of the same shape where they are given.

    What is read may have any strides, but for 1 between features. In what is written tokens follow one another, and so
    do the heads of a group; keys and values have the same strides.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (*heads, heads[1])[:3])
    into_q, into_k, into_v = (*into, into[1])[:3]
    rows, length, groups, shared, width = q.shape
    tokens = rows * length
    if tokens == 0:
        return
    each = schedule_of(tokens, groups * shared, width) if schedule is None else schedule
    keys, (q_strides, k_strides, v_strides) = k.shape[2], (x.stride() for x in (q, k, v))
    wide = max(q_strides[2] * groups, q_strides[3] * shared, k_strides[2] * keys, v_strides[2] * keys) >= 1 << 30
    by_row = positions.dim() == 2 and positions.shape[0] > 1
    with on_device(q):
        rotary_kernel[(triton.cdiv(tokens, each.tokens),)](
            positions, increments, factor, tokens, length, positions.stride(0) if by_row else 0, positions.stride(-1),
            q, k, v, into_q, into_k, into_v,
            *q_strides[:4], *k_strides[:3], *v_strides[:3],
            Q_STEP=into_q.stride(1), Q_GROUP=into_q.stride(2), KV_STEP=into_k.stride(1), KV_HEAD=into_k.stride(2),
            QUERIES=groups * shared, SHARED=shared, KEYS=keys, VALUES=len(heads) == 3,
            WIDTH=2 * increments.shape[0], HEAD=width, ADJACENT=adjacent, BACK=back, WIDE=wide, TOKENS=each.tokens,
            num_warps=each.warps,
        )  # fmt: skip


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context in which a launch goes to the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else NOTHING
