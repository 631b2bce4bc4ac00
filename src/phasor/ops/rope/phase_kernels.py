"""Rotation of queries and keys by phases that are given for every token, and for groups of heads; with its gradients.

A program takes some tokens and the heads that share their angles. It computes cosines and sines once, and goes through
the heads one by one, so that the gradient of the angles is a sum in its registers, in a fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2
from phasor.ops.rope.kernels import head_strides, phase_cos_sin
from phasor.ops.rope.reference import PhaseArgs

MANY_PAIRS = 2**20  # of tokens: enough to fill a device with programs of 1024


@triton.jit
def load_pairs(ptr, is_token, PAIRS: tl.constexpr, ADJACENT: tl.constexpr):
    """The first and the second features of the heads that `ptr` `[R, 1]` points to, `[R, BLOCK_D]` each, in float32."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(PAIRS)
    if ADJACENT:
        cols = tl.arange(0, 2 * BLOCK_D)[None, :]
        x = tl.load(ptr + cols, is_token & (cols < 2 * PAIRS), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, (ptr.shape[0], BLOCK_D, 2)))
    else:
        cols = tl.arange(0, BLOCK_D)[None, :]
        mask = is_token & (cols < PAIRS)
        u, v = tl.load(ptr + cols, mask, other=0.0), tl.load(ptr + (PAIRS + cols), mask, other=0.0)
        return u.to(tl.float32), v.to(tl.float32)


@triton.jit
def store_pairs(ptr, u, v, is_token, PAIRS: tl.constexpr, ADJACENT: tl.constexpr):
    """Store what `load_pairs` returns."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(PAIRS)
    u, v = u.to(ptr.dtype.element_ty), v.to(ptr.dtype.element_ty)
    if ADJACENT:
        cols = tl.arange(0, 2 * BLOCK_D)[None, :]
        tl.store(ptr + cols, tl.reshape(tl.join(u, v), (ptr.shape[0], 2 * BLOCK_D)), is_token & (cols < 2 * PAIRS))
    else:
        cols = tl.arange(0, BLOCK_D)[None, :]
        mask = is_token & (cols < PAIRS)
        tl.store(ptr + cols, u, mask)
        tl.store(ptr + (PAIRS + cols), v, mask)


@triton.jit
def copy_features(ptr, out_ptr, is_token, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Copy the features from FIRST on, of the heads that `ptr` `[R, 1]` points to."""
    if FIRST < HEAD_DIM:
        cols = FIRST + tl.arange(0, triton.next_power_of_2(HEAD_DIM - FIRST))[None, :]
        mask = is_token & (cols < HEAD_DIM)
        tl.store(out_ptr + cols, tl.load(ptr + cols, mask), mask)


@triton.jit
def load_angles(phase_ptr, scale_ptr, row, scale_row, is_token, INVERSE: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines `[R, BLOCK_D]` of the phases of rows `[R, 1]`, times their scale."""
    cols = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
    mask = is_token & (cols < PAIRS)
    cos, sin = phase_cos_sin(tl.load(phase_ptr + row * PAIRS + cols, mask, other=0))
    if INVERSE:
        sin = -sin
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + scale_row * PAIRS + cols, mask, other=0.0)
        cos, sin = cos * scale, sin * scale
    return cos, sin


@triton.jit
def rotate_head(
    ptr, out_ptr, y_ptr, cos, sin, dangle, is_token,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Rotate a head of some tokens. With what was rotated in `y_ptr` it is a gradient, of which `dangle` is the sum."""
    u, v = load_pairs(ptr, is_token, PAIRS, ADJACENT)
    if y_ptr is not None:
        y_u, y_v = load_pairs(y_ptr, is_token, PAIRS, ADJACENT)
        dangle += v * y_u - u * y_v
    store_pairs(out_ptr, u * cos - v * sin, v * cos + u * sin, is_token, PAIRS, ADJACENT)
    copy_features(ptr, out_ptr, is_token, 2 * PAIRS, HEAD_DIM)
    return dangle


@triton.jit(do_not_specialize=["T", "ROWS"])
def phase_kernel(
    phase_ptr, q_scale_ptr, k_scale_ptr, q_ptr, k_ptr, v_ptr, out_q_ptr, out_k_ptr, out_v_ptr,
    y_q_ptr, y_k_ptr, dangle_ptr,
    ROWS, T,
    stride_qb, stride_qt, stride_qg, stride_qh,  # of the inputs: batch, token, group of heads, head
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    STRIDE_OUT_QT: tl.constexpr, STRIDE_OUT_QG: tl.constexpr, STRIDE_OUT_KT: tl.constexpr, STRIDE_OUT_KH: tl.constexpr,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, INVERSE: tl.constexpr,
    PHASES_BY_ROW: tl.constexpr, SCALES_BY_ROW: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Queries `[B, T, K, GROUP_SIZE, D]`, keys and values `[B, T, K, D]` of some tokens whose group has these angles.

    INVERSE rotates the other way. With rotated queries and keys, `y_q_ptr` and `y_k_ptr`, the inputs are gradients of
    these, and `dangle_ptr` gets that of the angles `[B, T, GROUPS, PAIRS]`. Values are copied where they are given.
    """
    HEADS: tl.constexpr = NUM_HEADS // GROUPS
    KV_HEADS: tl.constexpr = NUM_KV_HEADS // GROUPS
    # 64 bits, as the strides of heads may be anything.
    group = (tl.program_id(0) % GROUPS).to(tl.int64)
    row = (tl.program_id(0) // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    is_token = row < ROWS
    b, t = row // T, row % T
    phase_row = (row if PHASES_BY_ROW else t) * GROUPS + group
    scale_row = row if SCALES_BY_ROW else t
    dangle = tl.zeros((BLOCK_T, triton.next_power_of_2(PAIRS)), tl.float32)
    cos, sin = load_angles(phase_ptr, q_scale_ptr, phase_row, scale_row, is_token, INVERSE, PAIRS)
    q_ptr += b * stride_qb + t * stride_qt
    out_q_ptr += row * STRIDE_OUT_QT
    for i in range(HEADS):
        head = group * HEADS + i
        of_group, in_group = head // GROUP_SIZE, head % GROUP_SIZE
        y_ptr = None if y_q_ptr is None else y_q_ptr + (row * NUM_HEADS + head) * HEAD_DIM
        dangle = rotate_head(
            q_ptr + (of_group * stride_qg + in_group * stride_qh),
            out_q_ptr + (of_group * STRIDE_OUT_QG + in_group * HEAD_DIM),
            y_ptr, cos, sin, dangle, is_token, PAIRS, HEAD_DIM, ADJACENT,
        )  # fmt: skip
    if q_scale_ptr is not None or k_scale_ptr is not None:
        cos, sin = load_angles(phase_ptr, k_scale_ptr, phase_row, scale_row, is_token, INVERSE, PAIRS)
    k_ptr += b * stride_kb + t * stride_kt
    out_k_ptr += row * STRIDE_OUT_KT
    for i in range(KV_HEADS):
        head = group * KV_HEADS + i
        out_offset = head * STRIDE_OUT_KH
        y_ptr = None if y_k_ptr is None else y_k_ptr + (row * NUM_KV_HEADS + head) * HEAD_DIM
        dangle = rotate_head(
            k_ptr + head * stride_kh, out_k_ptr + out_offset,
            y_ptr, cos, sin, dangle, is_token, PAIRS, HEAD_DIM, ADJACENT,
        )  # fmt: skip
        if v_ptr is not None:
            v_head = v_ptr + (b * stride_vb + t * stride_vt + head * stride_vh)
            copy_features(v_head, out_v_ptr + (row * STRIDE_OUT_KT + out_offset), is_token, 0, HEAD_DIM)
    if dangle_ptr is not None:
        cols = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
        dangle_ptr += (row * GROUPS + group) * PAIRS
        tl.store(dangle_ptr + cols, dangle if INVERSE else -dangle, is_token & (cols < PAIRS))


class PhaseLayout(NamedTuple):
    """All that the grid and the scalars of a launch depend on: shapes, strides and options."""

    q_shape: Sequence[int]
    q_strides: Sequence[int]
    k_shape: Sequence[int]
    k_strides: Sequence[int]
    v_strides: Sequence[int]
    out_q_shape: Sequence[int]
    out_q_strides: Sequence[int]
    out_k_strides: Sequence[int]
    phases_shape: Sequence[int]
    scales_by_row: bool
    adjacent: bool
    inverse: bool


def prepare(layout: PhaseLayout) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, the scalar arguments by name, and the options of a launch."""
    q_shape, q_strides, k_strides, v_strides = layout.q_shape, layout.q_strides, layout.k_strides, layout.v_strides
    rows, pairs, groups = q_shape[0] * q_shape[1], layout.phases_shape[-1], layout.phases_shape[-2]
    kv_groups, group_size = next((x[2:4] for x in (q_shape, layout.out_q_shape) if len(x) == 5), (q_shape[2], 1))
    stride_g, stride_h = head_strides(q_strides, group_size)
    width = next_power_of_2(pairs)
    # 8 pairs per thread: a load of 16 bytes for each half of them.
    elements = 1024 if rows * groups * width >= MANY_PAIRS else 256
    args = {
        "ROWS": rows, "T": q_shape[1],
        "stride_qb": q_strides[0], "stride_qt": q_strides[1], "stride_qg": stride_g, "stride_qh": stride_h,
        "stride_kb": k_strides[0], "stride_kt": k_strides[1], "stride_kh": k_strides[2],
        "stride_vb": v_strides[0], "stride_vt": v_strides[1], "stride_vh": v_strides[2],
        "STRIDE_OUT_QT": layout.out_q_strides[1],
        "STRIDE_OUT_QG": head_strides(layout.out_q_strides, group_size)[0],
        "STRIDE_OUT_KT": layout.out_k_strides[1], "STRIDE_OUT_KH": layout.out_k_strides[2],
        "GROUPS": groups, "NUM_HEADS": kv_groups * group_size, "NUM_KV_HEADS": layout.k_shape[2],
        "GROUP_SIZE": group_size, "PAIRS": pairs, "HEAD_DIM": q_shape[-1],
        "ADJACENT": layout.adjacent, "INVERSE": layout.inverse,
        "PHASES_BY_ROW": layout.phases_shape[0] > 1, "SCALES_BY_ROW": layout.scales_by_row,
        "BLOCK_T": max(elements // width, 1),
    }  # fmt: skip
    return (cdiv(rows, args["BLOCK_T"]) * groups,), args | {"num_warps": elements // 256}


launch = KernelLauncher(phase_kernel, prepare)


def launch_phases(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    args: PhaseArgs,
    *,
    adjacent: bool,
    inverse: bool,
    rotated: tuple[Tensor | None, Tensor | None] = (None, None),
    dangle: Tensor | None = None,
) -> None:
    """Rotate queries and keys `[B, T, K, D]`, and copy values of the same shape where they are given.

    Inputs and outputs are laid out as for `launch_rope`. Where the inputs are gradients of `rotated` queries and keys,
    which are contiguous, `dangle` is written: the gradient of the angles `[B, T, groups, pairs]`, in float32.
    """
    q, k, *values = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs)
    if q.shape[0] * q.shape[1] == 0:
        return
    out_q, out_k, *out_values = outputs
    v, out_v = (*values, None)[0], (*out_values, None)[0]
    y_q, y_k = rotated
    phases, scales = args.phases.contiguous(), (contiguous(args.q_scale), contiguous(args.k_scale))
    tensors = {
        "phase_ptr": phases, "q_scale_ptr": scales[0], "k_scale_ptr": scales[1],
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_q_ptr": out_q, "out_k_ptr": out_k, "out_v_ptr": out_v,
        "y_q_ptr": y_q, "y_k_ptr": y_k, "dangle_ptr": None if y_q is None else dangle,
    }  # fmt: skip
    layout = PhaseLayout(
        q.shape, q.stride(), k.shape, k.stride(), (k if v is None else v).stride(), out_q.shape, out_q.stride(),
        out_k.stride(), phases.shape, any(x is not None and x.shape[0] > 1 for x in scales), adjacent, inverse,
    )  # fmt: skip
    launch(q, tensors, layout)
