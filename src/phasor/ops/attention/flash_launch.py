"""Launches of the kernels of attention over key intervals: the forward kernel, and the two of the backward pass.

In the backward pass weights are recomputed from the scores and the logsumexp kept from the forward pass. One kernel
goes by blocks of queries, the other by blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from phasor.ops.attention.flash_dkdv_kernel import dkdv_kernel
from phasor.ops.attention.flash_dq_kernel import delta_kernel, dq_kernel
from phasor.ops.attention.flash_forward_kernel import forward_kernel
from phasor.ops.attention.flash_tiles import (
    LINEAR,
    LOG,
    LOG2E,
    NO_BIAS,
    POWER,
    TABLE,
    block_d,
    launch_options,
)
from phasor.ops.attention.intervals import query_ranges
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense

launch_forward, launch_delta = KernelLauncher(forward_kernel), KernelLauncher(delta_kernel)
launch_dq, launch_dkdv = KernelLauncher(dq_kernel), KernelLauncher(dkdv_kernel)


def kernel_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_mask: Tensor | None,
    min_distance: int,
    scale: float,
    softcap: float,
) -> dict[str, Any]:
    """The arguments that all kernels share, apart from those of a bias."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    _, queries, heads, head_dim = q.shape
    _, keys, kv_heads, _ = k.shape
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "bounds_ptr": bounds,
        "key_mask_ptr": None if key_mask is None else key_mask.contiguous().view(torch.uint8),
        "num_queries": queries,
        "num_keys": keys,
        "num_heads": heads,
        "group_size": heads // kv_heads,
        "scale": scale,
        "softcap": softcap,
        "min_distance": min_distance,
        **token_strides("q", q),
        **token_strides("k", k),
        **token_strides("v", v),
        "stride_boundsb": row_stride(bounds),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(q),
        "HAS_SOFTCAP": softcap > 0,
        "TWO_INTERVALS": bounds.shape[1] == 4,
        "HAS_KEY_MASK": key_mask is not None,
    }


def bias_args(
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    rates: Tensor | None,
    powers: Tensor | None,
    table: Tensor | None,
) -> dict[str, Any]:
    """The arguments of a bias by distance, which all kernels share. Tables are given to base 2."""
    bend = powers if rates is None else rates
    curve = LINEAR if bend is None else POWER if rates is None else LOG
    bias = NO_BIAS if query_positions is None else curve if table is None else TABLE
    return {
        "q_pos_ptr": query_positions,
        "k_pos_ptr": key_positions,
        "shifts_ptr": shifts,
        "table_ptr": None if table is None else (table.t().float() * LOG2E.value).contiguous(),
        "num_distances": 0 if table is None else len(table),
        "slopes_ptr": None if slopes is None else slopes.float().contiguous(),
        "bends_ptr": None if bend is None else bend.float().contiguous(),
        "stride_qposb": row_stride(query_positions),
        "stride_kposb": row_stride(key_positions),
        "stride_shiftsb": row_stride(shifts),
        "BIAS": bias.value,
    }


def token_strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of `[B, T, H, D]`, whose features are contiguous."""
    return dict(zip(stride_names(name), x.stride(), strict=False))  # that of the features has no name


@functools.cache
def stride_names(name: str) -> tuple[str, ...]:
    """The kernels' names of the strides of a tensor's batch, tokens and heads."""
    return tuple(f"stride_{name}{dim}" for dim in "bth")


def row_stride(x: Tensor | None) -> int:
    """The stride between rows; 0 where one row serves the whole batch."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def forward(
    sink_logits: Tensor | None, sink_queries: Tensor | None, sink_positions: Tensor | None, args: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    q = args["q_ptr"]
    rows, queries, heads, _ = q.shape
    out = empty_dense(q)
    lse = q.new_empty((rows, heads, queries), dtype=torch.float32)
    options = launch_options("forward", q)
    extra = {
        "out_ptr": out,
        "lse_ptr": lse,
        "sink_logits_ptr": sink_logits,
        "sink_q_ptr": None if sink_queries is None else sink_queries.contiguous(),
        "sink_pos_ptr": None if sink_positions is None else sink_positions.contiguous(),
        "stride_sinkposb": row_stride(sink_positions),
        "HAS_SINKS": sink_logits is not None,
        "HAS_SINK_QUERIES": sink_queries is not None,
    }
    launch_forward((cdiv(queries, options["BLOCK_M"]) * heads * rows,), q, args | extra | options)
    return out, lse


def key_block_ranges(bounds: Tensor, keys: int, q: Tensor) -> Tensor:
    """The queries that the backward pass visits for each of its blocks of keys."""
    return query_ranges(bounds, keys, launch_options("dkdv", q)["BLOCK_N"])


def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor | None,
    sink_logits: Tensor | None,
    bias_needs_grad: bool,
    args: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of a bias table `[distances, H]`, of slopes and of what bends their
    curve `[2, H]`, and of sink logits `[H]`.
    """
    q, k, v = args["q_ptr"], args["k_ptr"], args["v_ptr"]
    rows, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_strides = token_strides("do", grad)
    args = {**args, "lse_ptr": lse, "do_ptr": grad, **grad_strides}
    delta = torch.empty_like(lse)
    dq, dk, dv = empty_dense(q), empty_dense(k), empty_dense(v)
    dq_options, dkdv_options = launch_options("dq", q), launch_options("dkdv", q)
    blocks = cdiv(queries, dq_options["BLOCK_M"])
    dtable, dcurve, dsinks = lse.new_empty(0, heads), lse.new_empty(0, heads), lse.new_empty(0)
    table_needs_grad = bias_needs_grad and args["table_ptr"] is not None
    curve_needs_grad = bias_needs_grad and args["table_ptr"] is None
    if table_needs_grad:
        dtable = torch.zeros(rows, heads, blocks, args["num_distances"], device=q.device)
    if curve_needs_grad:
        dcurve = torch.empty(rows, heads, blocks, 2, device=q.device)
    per_program = max(1, 4096 // args["BLOCK_D"])
    total = rows * queries * heads
    sizes = {"num_queries": queries, "num_heads": heads, "rows": total, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": args["BLOCK_D"], "BLOCK_M": per_program}
    launch_delta(
        (cdiv(total, per_program),),
        q,
        {"out_ptr": out, "do_ptr": grad, "delta_ptr": delta, **grad_strides, **sizes},
    )
    args["delta_ptr"] = delta
    extra: dict[str, Any] = {"dq_ptr": dq, "dtable_ptr": dtable, "dcurve_ptr": dcurve}
    extra |= {"HAS_TABLE_GRAD": table_needs_grad, "HAS_CURVE_GRAD": curve_needs_grad}
    launch_dq((blocks * heads * rows,), q, args | extra | dq_options)
    ranges = key_block_ranges(args["bounds_ptr"], keys, q) if ranges is None else ranges
    extra = {"dk_ptr": dk, "dv_ptr": dv, "ranges_ptr": ranges, "stride_rangesb": row_stride(ranges)}
    launch_dkdv((cdiv(keys, dkdv_options["BLOCK_N"]) * kv_heads * rows,), q, args | extra | dkdv_options)
    if sink_logits is not None:
        p = torch.exp2(sink_logits.float()[:, None] * LOG2E.value - lse)
        dsinks = -(p * delta).sum((0, 2))
    if table_needs_grad:
        dtable = dtable.sum((0, 2)).t().contiguous()  # as its fake has it
    if curve_needs_grad:  # the bias is minus slope times curve
        by_slope, by_bend = -dcurve.sum((0, 2)).t()
        dcurve = torch.stack((by_slope, by_bend * args["slopes_ptr"]))
    return dq, dk, dv, dtable, dcurve, dsinks
