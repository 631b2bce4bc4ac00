"""The attention of one new token a row over a cache: rotation, the entry into the cache, and the sum over its keys.

The heads that share a key read it together. A row's keys are split among programs as evenly as its length allows
(which is read on the device, so that one launch serves all lengths); the last of them to end adds up the parts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.pdl import pdl_launch, pdl_wait
from phasor.ops.rope.kernels import cos_sin

SPLITS = 32  # the most parts of a row's keys
PROGRAMS = 264  # how many keep a large GPU busy


class Reading(NamedTuple):
    """How the keys are read: so many at a time, by so many warps, with so many reads under way."""

    keys: int
    warps: int
    stages: int


FEW, MANY = Reading(64, 2, 2), Reading(64, 4, 3)  # where keys are split among programs, and where they are not


@triton.jit
def weights_of(norm, stride, head, feature, inside):
    """A norm's weights; `stride` is 0 where all heads share them."""
    return tl.load(norm + head * stride + feature, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def read(keys, values, start, stop, slot, step, D: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr):
    """Keys and values from a slot on, `step` numbers apart, and which of them are seen: not the new token's own."""
    at, feature = start + tl.arange(0, KEYS), tl.arange(0, DIMS)[None, :]
    seen = (at < stop) & (at != slot)
    lines, there = at.to(tl.int64)[:, None] * step + feature, seen[:, None] & (feature < D)
    return tl.load(keys + lines, mask=there, other=0.0), tl.load(values + lines, mask=there, other=0.0), seen


@triton.jit
def taken_in(q, k, v, seen, scale, top, total, acc):
    """The greatest score, the sum of weights and the weighted sum of values, with further keys taken in."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    p, shrunk = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    total = total * shrunk + tl.sum(p, axis=1)
    return higher, total, tl.dot(p.to(v.dtype), v, acc * shrunk[:, None], input_precision="ieee")


@triton.jit
def attend_kernel(
    qkv, keys, values, counts, positions, increments, factor, q_norm, k_norm, q_stride, k_stride, offset, eps,
    scale, sums, tops, arrived, out, slots, ring, sinks, splits,
    SHARED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(1)
    count = tl.load(counts + row)  # tokens before this one
    held = tl.minimum(count, slots).to(tl.int32)
    slot = tl.where(count < sinks, count, sinks + (count - sinks) % ring).to(tl.int32)  # where this one goes
    share = tl.maximum(tl.cdiv(tl.cdiv(held, splits), KEYS), 1) * KEYS
    parts = tl.maximum(tl.cdiv(held, share), 1)
    if split >= parts:
        return

    # Read before the wait are counts and angles and, if EARLY, the first of the keys. No kernel since the first one of
    # the step writes them, and that one, which looks up the tokens' vectors, begins when all before it has ended.
    head, d = tl.arange(0, TILE)[:, None], tl.arange(0, DIMS)
    feature = d[None, :]
    if WIDTH > 0:
        turns = d < WIDTH
        if ADJACENT:
            pair, partner, second = d // 2, d ^ 1, d % 2 == 1
        else:
            second = d >= WIDTH // 2
            pair, partner = d % (WIDTH // 2), tl.where(second, d - WIDTH // 2, d + WIDTH // 2)
        cos, sin = cos_sin(tl.load(positions + row), tl.load(increments + pair, mask=turns, other=0))
        grown = tl.where(turns, factor, 1.0)
    mine = (row * slots * groups + group) * D
    begin, stop = split * share, tl.minimum((split + 1) * share, held)
    if EARLY:
        k, v, seen = read(keys + mine, values + mine, begin, stop, slot, groups * D, D, KEYS, DIMS)
    pdl_wait(USE_PDL)

    # The group's queries and, after them, its key: normed, then turned.
    new = qkv + (row * groups + group) * (SHARED + 2) * D
    inside = (head <= SHARED) & (feature < D)
    x = tl.load(new + head * D + feature, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(new + (SHARED + 1) * D + d, mask=d < D, other=0.0)
    if WIDTH > 0:
        other = tl.load(new + head * D + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    if q_norm is not None:
        asks = (head < SHARED) & inside
        answers = (head == SHARED) & inside
        size = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        own = group * SHARED + head
        w = weights_of(q_norm, q_stride, own, feature, asks) + weights_of(k_norm, k_stride, group, feature, answers)
        x *= size * (offset + w)
        if WIDTH > 0:
            beside = partner[None, :]
            w = weights_of(q_norm, q_stride, own, beside, asks & turns[None, :])
            w += weights_of(k_norm, k_stride, group, beside, answers & turns[None, :])
            other *= size * (offset + w)
    if WIDTH > 0:
        x = x * (cos * grown)[None, :] + other * (tl.where(second, sin, -sin) * grown)[None, :]
    q = x.to(qkv.dtype.element_ty)
    key = tl.sum(tl.where(head == SHARED, q.to(tl.float32), 0.0), axis=0)

    # What this program has of the sum: the new token, where it is the first, and its share of the cache.
    first = split == 0
    top = tl.where(first, tl.sum(q.to(tl.float32) * key[None, :], axis=1) * scale, -1e30)
    total = tl.zeros([TILE], tl.float32) + tl.where(first, 1.0, 0.0)
    acc = tl.zeros([TILE, DIMS], tl.float32) + tl.where(first, value.to(tl.float32), 0.0)[None, :]
    if first:
        to = mine + slot.to(tl.int64) * groups * D + d
        tl.store(keys + to, key.to(keys.dtype.element_ty), mask=d < D)
        tl.store(values + to, value, mask=d < D)
    if EARLY:
        top, total, acc = taken_in(q, k, v, seen, scale, top, total, acc)
        begin += KEYS
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        k, v, seen = read(keys + mine, values + mine, start, stop, slot, groups * D, D, KEYS, DIMS)
        top, total, acc = taken_in(q, k, v, seen, scale, top, total, acc)

    lane, heads = tl.arange(0, TILE), (row * groups + group) * SHARED
    if parts == 1:
        inside = (head < SHARED) & (feature < D)
        tl.store(out + (heads + head) * D + feature, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = heads * splits + split * SHARED
        tl.store(sums + (part + head) * D + feature, acc, mask=(head < SHARED) & (feature < D))
        tl.store(tops + (part + lane) * 2, top, mask=lane < SHARED)
        tl.store(tops + (part + lane) * 2 + 1, total, mask=lane < SHARED)
        tl.debug_barrier()
        if tl.atomic_add(arrived + row * groups + group, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row * groups + group, 0)
            each, one = tl.arange(0, SPLITS)[:, None], tl.arange(0, HEADS)[None, :]
            there = (each < parts) & (one < SHARED)
            place = heads * splits + each * SHARED + one
            high = tl.load(tops + place * 2, mask=there, other=-1e30, cache_modifier=".cg")
            share_of = tl.exp2(high - tl.max(high, axis=0)[None, :])
            totals = tl.load(tops + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            share_of = share_of / tl.sum(totals * share_of, axis=0)[None, :]
            wanted = there[:, :, None] & (d < D)[None, None, :]
            lines = place[:, :, None] * D + d[None, None, :]
            whole = tl.load(sums + lines, mask=wanted, other=0.0, cache_modifier=".cg") * share_of[:, :, None]
            lone = tl.arange(0, HEADS)[:, None]
            together = tl.sum(whole, axis=0).to(out.dtype.element_ty)
            tl.store(out + (heads + lone) * D + feature, together, mask=(lone < SHARED) & (feature < D))


class Turning(NamedTuple):
    """Rotary positions: increments of a turn by pair, the attention factor, and how features are paired."""

    increments: Tensor
    factor: float
    width: int
    adjacent: bool


class HeadNorm(NamedTuple):
    """RMS norms of queries and keys, with one weight for all heads `[D]` or one for each `[heads, D]`."""

    queries: Tensor
    keys: Tensor
    offset: float
    eps: float


class Desk:
    """Where the parts of a row's sum lie until they are added up; one serves all layers of a step."""

    def __init__(self, rows: int, groups: int, shared: int, width: int, device: torch.device) -> None:
        self.splits = max(1, min(SPLITS, PROGRAMS // (rows * groups)))
        parts = rows * groups * shared * self.splits
        self.sums = torch.empty(parts, width, device=device)
        self.tops = torch.empty(parts, 2, device=device)
        self.arrived = torch.zeros(rows * groups, dtype=torch.int32, device=device)


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    positions: Tensor,
    out: Tensor,
    desk: Desk,
    *,
    scale: float,
    turning: Turning | None = None,
    norm: HeadNorm | None = None,
    sinks: int = 0,
    reading: Reading | None = None,
    pdl: bool = False,
) -> Tensor:
    """One token a row: `qkv [B, K * (shared + 2) * D]` by group, over a cache `[B, slots, K, D]` that gets its entry.

    `counts [B]` are the tokens a row holds and `positions [B]` where the new one stands. Of the slots the first `sinks`
    keep their tokens, and the others go around as a ring. The result, `[B, H * D]`, goes into `out`.
    """
    rows, slots, groups, width = keys.shape
    shared = qkv.shape[1] // (groups * width) - 2
    how = reading or (FEW if desk.splits > 1 else MANY)
    splits = max(1, min(desk.splits, triton.cdiv(slots, how.keys)))
    q_norm, k_norm, offset, eps = norm or (None, None, 0.0, 0.0)
    q_stride, k_stride = (width if w is not None and w.dim() == 2 else 0 for w in (q_norm, k_norm))
    increments, factor, turned, adjacent = turning or (counts, 1.0, 0, False)
    attend_kernel[(splits, groups, rows)](
        qkv, keys, values, counts, positions, increments, factor, q_norm, k_norm, q_stride, k_stride, offset, eps,
        scale * 1.4426950408889634, desk.sums, desk.tops, desk.arrived, out, slots, slots - sinks, sinks, splits,
        SHARED=shared, D=width, WIDTH=turned, ADJACENT=adjacent,
        HEADS=triton.next_power_of_2(shared), TILE=max(16, triton.next_power_of_2(shared + 1)),
        DIMS=max(16, triton.next_power_of_2(width)), KEYS=how.keys, SPLITS=triton.next_power_of_2(splits),
        STAGES=how.stages, EARLY=splits > 1, USE_PDL=pdl, num_warps=how.warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
