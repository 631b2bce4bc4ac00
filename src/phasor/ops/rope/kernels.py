"""Rotation of queries and keys in one pass over memory; the angles are computed from positions inside the kernel.

A program takes one token: it computes the token's cosines and sines once and rotates its heads by them. Inputs and
outputs are addressed by strides, so the heads may lie in separate tensors or inside a fused projection.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, supports_pdl
from phasor.ops.pdl import pdl_launch, pdl_wait

MANY_TOKENS = 1024  # a launch for fewer uses programmatic dependent launch


class Schedule(NamedTuple):
    """How a launch is split: programs that share the heads of a token, and the warps of each.

    With `halves`, where a whole head is rotated with pairing `half`, each half is loaded and stored by itself.
    Otherwise every feature is loaded beside its partner: angles are computed twice, and heads are stored whole.
    """

    splits: int
    num_warps: int
    halves: bool = False


def choose_schedule(tokens: int, heads: int, head_dim: int) -> Schedule:
    """The schedule for this many tokens and heads."""
    if tokens >= MANY_TOKENS:
        return Schedule(1, min(max(triton.next_power_of_2(heads) * triton.next_power_of_2(head_dim) // 1024, 1), 8))
    if tokens > 256:  # enough to fill the device
        return Schedule(min(2, max(heads, 1)), 2, halves=True)
    return Schedule(min(4, max(heads, 1)), 1 if tokens > 128 else 2, halves=True)


@triton.jit
def cos_sin(position, increments):
    """Cosine and sine of `position * increment`, a 64-bit fraction of a rotation that wraps around."""
    return phase_cos_sin(position * increments)


@triton.jit
def phase_cos_sin(phase):
    """Cosine and sine of a 64-bit fraction of a rotation.

    The nearest quarter rotation is subtracted in integers. The polynomials interpolate the sine and cosine of
    `2 pi z` at Chebyshev points for `z` of at most an eighth of a rotation, with an error below 1e-8 each.
    """
    phase = (phase >> 32).to(tl.int32)
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
def load_pairs(
    ptr, mask, ROTARY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, USE_HALVES: tl.constexpr
):
    """The heads that `ptr` `[R, 1]` points to, as two tensors `[R, C]`: features, and those they are paired with.

    Without ADJACENT and USE_HALVES the first tensor has both features of every pair, and the second is a cached reload.
    """
    if ADJACENT:
        cols = tl.arange(0, 2 * triton.next_power_of_2((HEAD_DIM + 1) // 2))[None, :]
        x = tl.load(ptr + cols, mask & (cols < HEAD_DIM))
        return tl.split(tl.reshape(x, (ptr.shape[0], x.shape[1] // 2, 2)))
    elif USE_HALVES:
        cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM // 2))[None, :]
        half_mask = mask & (cols < HEAD_DIM // 2)
        return tl.load(ptr + cols, half_mask), tl.load(ptr + (HEAD_DIM // 2 + cols), half_mask)
    else:
        cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
        CONTIGUOUS: tl.constexpr = (ROTARY_DIM // 2) & -(ROTARY_DIM // 2)  # features whose partners are contiguous too
        partner = tl.where(cols < ROTARY_DIM // 2, cols + ROTARY_DIM // 2, cols - ROTARY_DIM // 2)
        partner = tl.max_contiguous(tl.multiple_of(partner, (1, CONTIGUOUS)), (1, CONTIGUOUS))
        return tl.load(ptr + cols, mask & (cols < HEAD_DIM)), tl.load(ptr + partner, mask & (cols < ROTARY_DIM))


@triton.jit
def rotate_and_store(
    x, y, cos, sin, ptr, mask,
    ROTARY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, USE_HALVES: tl.constexpr,
):  # fmt: skip
    """Rotate what `load_pairs` returned, and store it to the heads that `ptr` `[R, 1]` points to."""
    dtype = ptr.dtype.element_ty
    x, y = x.to(tl.float32), y.to(tl.float32)
    if ADJACENT:
        u, v = x * cos - y * sin, y * cos + x * sin
        if ROTARY_DIM < HEAD_DIM:
            is_rotary = tl.arange(0, x.shape[1])[None, :] < ROTARY_DIM // 2
            u, v = tl.where(is_rotary, u, x), tl.where(is_rotary, v, y)
        cols = tl.arange(0, 2 * x.shape[1])[None, :]
        z = tl.reshape(tl.join(u.to(dtype), v.to(dtype)), (x.shape[0], 2 * x.shape[1]))
        tl.store(ptr + cols, z, mask & (cols < HEAD_DIM))
    elif USE_HALVES:
        cols = tl.arange(0, x.shape[1])[None, :]
        half_mask = mask & (cols < HEAD_DIM // 2)
        tl.store(ptr + cols, (x * cos - y * sin).to(dtype), half_mask)
        tl.store(ptr + (HEAD_DIM // 2 + cols), (y * cos + x * sin).to(dtype), half_mask)
    else:
        cols = tl.arange(0, x.shape[1])[None, :]
        z = x * cos + y * tl.where(cols < ROTARY_DIM // 2, -sin, sin)
        tl.store(ptr + cols, tl.where(cols < ROTARY_DIM, z, x).to(dtype), mask & (cols < HEAD_DIM))


@triton.jit(do_not_specialize=["position_ptr", "T", "stride_pb", "stride_pt"])
def _rope_kernel(
    position_ptr, increment_ptr, factor_ptr, q_ptr, k_ptr, v_ptr, out_q_ptr, out_k_ptr, out_v_ptr,
    T, stride_pb, stride_pt,
    stride_qb, stride_qt, stride_qg, stride_qh,  # of the inputs: batch, token, group of heads, head
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    STRIDE_OUT_QT: tl.constexpr, STRIDE_OUT_QG: tl.constexpr, STRIDE_OUT_KT: tl.constexpr, STRIDE_OUT_KH: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HAS_V: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, INVERSE: tl.constexpr,
    USE_INT64: tl.constexpr, USE_HALVES: tl.constexpr, NUM_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Queries `[B, T, K, GROUP_SIZE, D]`, keys and values `[B, T, K, D]` of one token, from inputs to outputs.

    NUM_SPLITS programs share the heads of a token. INVERSE rotates the other way, which is the gradient. With HAS_V
    the values are copied along. USE_INT64 is for heads further apart than 32 bits address.
    """
    BLOCK_H: tl.constexpr = triton.next_power_of_2((NUM_HEADS + NUM_SPLITS - 1) // NUM_SPLITS) if NUM_HEADS > 0 else 1
    BLOCK_G: tl.constexpr = (
        triton.next_power_of_2((NUM_KV_HEADS + NUM_SPLITS - 1) // NUM_SPLITS) if NUM_KV_HEADS > 0 else 1
    )
    USE_PAIRS: tl.constexpr = ADJACENT or USE_HALVES
    token, split = tl.program_id(0), tl.program_id(1)
    q_head, kv_head = split * BLOCK_H + tl.arange(0, BLOCK_H)[:, None], split * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    q_mask, kv_mask = q_head < NUM_HEADS, kv_head < NUM_KV_HEADS
    group, in_group = q_head // GROUP_SIZE, q_head % GROUP_SIZE
    if USE_INT64:
        group, in_group, kv_head = group.to(tl.int64), in_group.to(tl.int64), kv_head.to(tl.int64)
    b, t, out_t = (token // T).to(tl.int64), (token % T).to(tl.int64), token.to(tl.int64)
    pdl_wait(USE_PDL)
    # All loads are issued before the angles are computed, which takes as long as loading does.
    position, factor = tl.load(position_ptr + b * stride_pb + t * stride_pt), tl.load(factor_ptr)
    pair = tl.arange(0, triton.next_power_of_2((HEAD_DIM + 1) // 2 if USE_PAIRS else HEAD_DIM))
    if not USE_PAIRS:
        pair = tl.where(pair < ROTARY_DIM // 2, pair, pair - ROTARY_DIM // 2)
    increment = tl.load(increment_ptr + pair, pair < ROTARY_DIM // 2, other=0)
    q_ptr = q_ptr + b * stride_qb + t * stride_qt + group * stride_qg + in_group * stride_qh
    out_q_ptr = out_q_ptr + out_t * STRIDE_OUT_QT + group * STRIDE_OUT_QG + in_group * HEAD_DIM
    q_x, q_y = load_pairs(q_ptr, q_mask, ROTARY_DIM, HEAD_DIM, ADJACENT, USE_HALVES)
    if NUM_KV_HEADS > 0:
        k_ptr = k_ptr + b * stride_kb + t * stride_kt + kv_head * stride_kh
        out_k_ptr = out_k_ptr + out_t * STRIDE_OUT_KT + kv_head * STRIDE_OUT_KH
        k_x, k_y = load_pairs(k_ptr, kv_mask, ROTARY_DIM, HEAD_DIM, ADJACENT, USE_HALVES)
    cos, sin = cos_sin(position, increment)
    cos, sin = (cos * factor)[None, :], ((-sin if INVERSE else sin) * factor)[None, :]
    rotate_and_store(q_x, q_y, cos, sin, out_q_ptr, q_mask, ROTARY_DIM, HEAD_DIM, ADJACENT, USE_HALVES)
    if NUM_KV_HEADS > 0:
        rotate_and_store(k_x, k_y, cos, sin, out_k_ptr, kv_mask, ROTARY_DIM, HEAD_DIM, ADJACENT, USE_HALVES)
    if HAS_V:
        cols = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
        v_mask = kv_mask & (cols < HEAD_DIM)
        v = tl.load(v_ptr + b * stride_vb + t * stride_vt + kv_head * stride_vh + cols, v_mask)
        tl.store(out_v_ptr + out_t * STRIDE_OUT_KT + kv_head * STRIDE_OUT_KH + cols, v, v_mask)


class RopeLayout(NamedTuple):
    """All that the grid and the scalars of a launch depend on: shapes, strides and options."""

    q_shape: Sequence[int]
    q_strides: Sequence[int]
    k_shape: Sequence[int]
    k_strides: Sequence[int]
    v_strides: Sequence[int]
    out_q_shape: Sequence[int]
    out_q_strides: Sequence[int]
    out_k_strides: Sequence[int]
    position_shape: Sequence[int]
    position_strides: Sequence[int]
    pairs: int
    has_v: bool
    adjacent: bool
    inverse: bool
    schedule: Schedule | None
    device: torch.device


def prepare(layout: RopeLayout) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, the scalar arguments by name, and the options of a launch."""
    q_shape, q_strides, k_strides, v_strides = layout.q_shape, layout.q_strides, layout.k_strides, layout.v_strides
    batch, tokens, head_dim, kv_heads = q_shape[0], q_shape[1], q_shape[-1], layout.k_shape[2]
    groups, group_size = next((x[2:4] for x in (q_shape, layout.out_q_shape) if len(x) == 5), (q_shape[2], 1))
    stride_g, stride_h = head_strides(q_strides, group_size)
    schedule = layout.schedule or choose_schedule(batch * tokens, groups * group_size, head_dim)
    halves = schedule.halves and 2 * layout.pairs == head_dim and not layout.adjacent
    spans = stride_g * groups, stride_h * group_size, k_strides[2] * kv_heads, v_strides[2] * kv_heads
    by_row = len(layout.position_shape) == 2 and layout.position_shape[0] > 1
    pdl = batch * tokens < MANY_TOKENS and supports_pdl(layout.device)
    args = {
        "T": tokens, "stride_pb": layout.position_strides[0] if by_row else 0,
        "stride_pt": layout.position_strides[-1],
        "stride_qb": q_strides[0], "stride_qt": q_strides[1], "stride_qg": stride_g, "stride_qh": stride_h,
        "stride_kb": k_strides[0], "stride_kt": k_strides[1], "stride_kh": k_strides[2],
        "stride_vb": v_strides[0], "stride_vt": v_strides[1], "stride_vh": v_strides[2],
        "STRIDE_OUT_QT": layout.out_q_strides[1],
        "STRIDE_OUT_QG": head_strides(layout.out_q_strides, group_size)[0],
        "STRIDE_OUT_KT": layout.out_k_strides[1], "STRIDE_OUT_KH": layout.out_k_strides[2],
        "NUM_HEADS": groups * group_size, "GROUP_SIZE": group_size, "NUM_KV_HEADS": kv_heads, "HAS_V": layout.has_v,
        "ROTARY_DIM": 2 * layout.pairs, "HEAD_DIM": head_dim, "ADJACENT": layout.adjacent, "INVERSE": layout.inverse,
        "USE_INT64": max(spans) >= 1 << 30, "USE_HALVES": halves, "NUM_SPLITS": schedule.splits, "USE_PDL": pdl,
    }  # fmt: skip
    return (batch * tokens, schedule.splits), args | {"num_warps": schedule.num_warps, **pdl_launch(pdl)}


launch = KernelLauncher(_rope_kernel, prepare, unaligned=("position_ptr",))


def launch_rope(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    positions: Tensor,
    increments: Tensor,
    factor: Tensor,
    *,
    adjacent: bool,
    inverse: bool,
    schedule: Schedule | None = None,
) -> None:
    """Rotate queries and keys `[B, T, K, D]`, and copy values of the same shape where they are given.

    Queries are `[B, T, H, D]` or, by group, `[B, T, K, H/K, D]`. Inputs may have any strides, except that of the
    features, which is 1. In outputs the tokens are contiguous, and so are the heads of a group; keys and values have
    the same strides.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (*inputs, inputs[1])[:3])
    if q.shape[0] * q.shape[1] == 0:
        return
    out_q, out_k, out_v = (*outputs, outputs[1])[:3]
    tensors = {
        "position_ptr": positions, "increment_ptr": increments, "factor_ptr": factor,
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_q_ptr": out_q, "out_k_ptr": out_k, "out_v_ptr": out_v,
    }  # fmt: skip
    layout = RopeLayout(
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), out_q.shape, out_q.stride(), out_k.stride(),
        positions.shape, positions.stride(), len(increments), len(inputs) == 3, adjacent, inverse, schedule, q.device,
    )  # fmt: skip
    launch(q, tensors, layout)


def head_strides(strides: Sequence[int], group_size: int) -> tuple[int, int]:
    """The strides of a group of heads and of a head, for queries with or without a dimension of groups."""
    return (strides[2], strides[3]) if len(strides) == 5 else (strides[2] * group_size, strides[2])
