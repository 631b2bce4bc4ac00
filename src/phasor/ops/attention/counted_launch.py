"""Launches of the kernels of attention with a bias of counted keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.ops.attention.counted_args import NearArgs, padded_rows
from phasor.ops.attention.counted_backward_kernel import near_backward_kernel
from phasor.ops.attention.counted_kernels import count_kernel, near_kernel
from phasor.ops.attention.flash_launch import contiguous_features, output_dot_gradient, row_stride, token_strides
from phasor.ops.attention.flash_tiles import LOG2E, Tiling, block_d
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense

Launch = tuple[tuple[int, ...], dict[str, Any]]  # the grid, and by name the scalars and options

# By kernel and bytes per element, then by the features of a head, a power of two.
TILINGS = {
    ("count", 2): {64: Tiling(64, 64, 4, 1), 128: Tiling(64, 64, 4, 1), 256: Tiling(64, 64, 8, 1)},
    ("count", 4): {64: Tiling(32, 32, 4, 1), 128: Tiling(32, 32, 4, 1), 256: Tiling(32, 32, 8, 1)},
    ("forward", 2): {64: Tiling(64, 32, 4, 1), 128: Tiling(64, 32, 4, 1), 256: Tiling(64, 32, 8, 1)},
    ("forward", 4): {64: Tiling(32, 32, 4, 1), 128: Tiling(32, 32, 8, 1), 256: Tiling(32, 16, 8, 1)},
    ("backward", 2): {64: Tiling(64, 32, 4, 1), 128: Tiling(64, 32, 4, 1), 256: Tiling(64, 32, 8, 1)},
    ("backward", 4): {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 16, 8, 1), 256: Tiling(16, 16, 8, 1)},
}


def tiling(kernel: str, q: Tensor) -> Tiling:
    """The tiling of the `"count"`, `"forward"` or `"backward"` kernel."""
    return TILINGS[kernel, q.element_size()][max(64, block_d(q.shape[-1]))]


class CountedLayout(NamedTuple):
    """All that the grids and scalars of the kernels depend on: sizes, strides and options."""

    q_shape: Sequence[int]
    q_strides: Sequence[int]
    k_shape: Sequence[int]
    k_strides: Sequence[int]
    num_rows: int
    stride_row: int
    stride_bounds: int
    has_key_mask: bool
    scale: float


def counted_layout(
    q: Tensor, k: Tensor, num_rows: int, by_row: Tensor, bounds: Tensor, key_mask: Tensor | None, scale: float
) -> CountedLayout:
    """The layout of tensors as kernels read them."""
    strides = by_row.shape[-1], row_stride(bounds)
    return CountedLayout(q.shape, q.stride(), k.shape, k.stride(), num_rows, *strides, key_mask is not None, scale)


def shared_launch(layout: CountedLayout, tiles: Tiling) -> Launch:
    """A program for each block of queries of a head, and the arguments that all kernels share."""
    rows, queries, heads, head_dim = layout.q_shape
    _, keys, kv_heads, _ = layout.k_shape
    scalars = {
        "num_queries": queries, "num_keys": keys, "num_heads": heads, "group_size": heads // kv_heads,
        "num_rows": layout.num_rows, "stride_row": layout.stride_row, "scale": float(layout.scale),
        **token_strides("q", layout.q_strides), **token_strides("k", layout.k_strides),
        "stride_boundsb": layout.stride_bounds, "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim),
        "HAS_KEY_MASK": layout.has_key_mask, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    return (cdiv(queries, tiles.block_m) * heads * rows,), scalars


def prepare_forward(
    layout: CountedLayout, tiles: Tiling, v_strides: Sequence[int], softcap: float, has_sinks: bool
) -> Launch:
    grid, scalars = shared_launch(layout, tiles)
    options = {"softcap": float(softcap), "HAS_SOFTCAP": softcap > 0, "HAS_SINKS": has_sinks}
    return grid, scalars | token_strides("v", v_strides) | options


def prepare_backward(
    layout: CountedLayout, tiles: Tiling, v_strides: Sequence[int], grad_strides: Sequence[int], softcap: float
) -> Launch:
    grid, scalars = shared_launch(layout, tiles)
    options = {"softcap": float(softcap), "HAS_SOFTCAP": softcap > 0}
    return grid, scalars | token_strides("v", v_strides) | token_strides("do", grad_strides) | options


launch_count = KernelLauncher(count_kernel, shared_launch)
launch_forward = KernelLauncher(near_kernel, prepare_forward)
launch_backward = KernelLauncher(near_backward_kernel, prepare_backward)


def as_bytes(key_mask: Tensor | None) -> Tensor | None:
    """A mask of keys as kernels read it."""
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def count(
    q: Tensor, k: Tensor, table: Tensor, bounds: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Products of queries with the rows of a table, float32 `[B, H, Tq, padded_rows]`, and where near keys begin,
    int32 `[B, H, Tq]`.
    """
    q, k, table, key_mask = contiguous_features(q), contiguous_features(k), table.contiguous(), as_bytes(key_mask)
    rows, queries, heads, _ = q.shape
    by_row = q.new_empty((rows, heads, queries, padded_rows(table)), dtype=torch.float32)
    ends = q.new_empty((rows, heads, queries), dtype=torch.int32)
    tensors = {"q_ptr": q, "k_ptr": k, "table_ptr": table, "by_row_ptr": by_row, "ends_ptr": ends}
    layout = counted_layout(q, k, len(table), by_row, bounds, key_mask, scale)
    launch_count(q, {**tensors, "bounds_ptr": bounds, "key_mask_ptr": key_mask}, layout, tiling("count", q))
    return by_row, ends


def for_kernels(args: NearArgs) -> tuple[NearArgs, CountedLayout]:
    """The arguments as kernels read them, and their layout."""
    q, k, v = map(contiguous_features, (args.q, args.k, args.v))
    args = args._replace(q=q, k=k, v=v, key_mask=as_bytes(args.key_mask))
    return args, counted_layout(q, k, args.num_rows, args.by_row, args.bounds, args.key_mask, args.scale)


def forward(args: NearArgs) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    args, layout = for_kernels(args)
    q, v, sinks = args.q, args.v, args.sink_logits
    rows, queries, heads, _ = q.shape
    out, lse = empty_dense(q), q.new_empty((rows, heads, queries), dtype=torch.float32)
    tensors = {
        "q_ptr": q, "k_ptr": args.k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse, "by_row_ptr": args.by_row,
        "starts_ptr": args.starts, "ends_ptr": args.ends, "bounds_ptr": args.bounds, "key_mask_ptr": args.key_mask,
        "sink_logits_ptr": None if sinks is None else sinks.float().contiguous(),
    }  # fmt: skip
    launch_forward(q, tensors, layout, tiling("forward", q), v.stride(), args.softcap, sinks is not None)
    return out, lse


def backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: NearArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of products with the rows of the table, and of sink logits."""
    args, layout = for_kernels(args)
    q, k, v = args.q, args.k, args.v
    grad = contiguous_features(grad.to(q.dtype))
    delta = output_dot_gradient(out, grad, lse)
    if grad_lse is not None:  # a score's share of the logsumexp is its weight, as of the output
        delta = delta - grad_lse * LOG2E.value
    dq = empty_dense(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    dby_row = torch.zeros_like(args.by_row)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": grad, "lse_ptr": lse, "delta_ptr": delta, "dq_ptr": dq,
        "dk_ptr": dk, "dv_ptr": dv, "dby_row_ptr": dby_row, "by_row_ptr": args.by_row, "starts_ptr": args.starts,
        "ends_ptr": args.ends, "bounds_ptr": args.bounds, "key_mask_ptr": args.key_mask,
    }  # fmt: skip
    launch_backward(q, tensors, layout, tiling("backward", q), v.stride(), grad.stride(), args.softcap)
    dsinks = lse.new_empty((0, 0))
    if args.sink_logits is not None:
        p = torch.exp2(args.sink_logits.float()[..., None] * LOG2E.value - lse)
        dsinks = -(p * delta).sum(-1)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dby_row, dsinks
