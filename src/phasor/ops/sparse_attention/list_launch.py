"""Launches of the kernels over lists of key blocks, and of the choice of blocks by score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasor.ops.attention.flash_dq_kernel import delta_kernel
from phasor.ops.attention.flash_launch import row_stride, token_strides
from phasor.ops.attention.flash_tiles import block_d, tiling
from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2
from phasor.ops.sparse_attention.list_dkdv_kernel import list_dkdv_kernel
from phasor.ops.sparse_attention.list_kernels import list_dq_kernel, list_forward_kernel, merge_kernel
from phasor.ops.sparse_attention.select_kernel import select_kernel
from phasor.ops.sparse_attention.tile_lists import TileLists, largest_tile

launch_forward, launch_merge = KernelLauncher(list_forward_kernel), KernelLauncher(merge_kernel)
launch_dq, launch_dkdv = KernelLauncher(list_dq_kernel), KernelLauncher(list_dkdv_kernel)
launch_delta, launch_select = KernelLauncher(delta_kernel), KernelLauncher(select_kernel)
SELECT_TILE = {2: 64, 4: 32}  # queries and blocks whose scores a program of the choice holds, by bytes per element


@dataclass(frozen=True)
class ListArgs:
    """What all kernels over lists take: blocks of `block` keys, `slots` per query, queries after `offset` others."""

    lists: TileLists
    block: int
    slots: int
    offset: int
    causal: bool
    scale: float

    def kernel_args(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """The arguments that the kernels share."""
        lists = self.lists
        args: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "pairs_ptr": lists.pairs}
        args |= {"num_queries": q.shape[1], "num_keys": k.shape[1], "num_heads": q.shape[2]}
        args |= {"group_size": q.shape[2] // k.shape[2], "offset": self.offset, "scale": self.scale}
        for name, x in (("q", q), ("k", k), ("v", v)):
            args |= token_strides(name, x)
        args["stride_pairs"] = row_stride(lists.pairs)
        args |= {"HEAD_DIM": q.shape[-1], "BLOCK_D": block_d(q), "BLOCK_M": lists.pairs.shape[-1]}
        return args | {"BLOCK": self.block, "SLOTS": self.slots, "CAUSAL": self.causal}

    def entry_args(self) -> dict[str, Any]:
        """The lists of key blocks of every tile."""
        lists = self.lists
        args: dict[str, Any] = {"spans_ptr": lists.spans, "entries_ptr": lists.entries}
        args |= {"num_tiles": lists.pairs.shape[1], "stride_spans": row_stride(lists.spans)}
        return args | {"stride_entries": row_stride(lists.entries)}

    def options(self, kernel: str, q: Tensor) -> dict[str, Any]:
        """The keys of a tile and the launch options of the `"forward"`, `"dq"` or `"dkdv"` kernel."""
        _, block_n, num_warps, num_stages = tiling(kernel, q)
        return {"BLOCK_N": largest_tile(self.block, block_n), "num_warps": num_warps, "num_stages": num_stages}


def tile_queries(q: Tensor, block: int | None = None) -> int:
    """How many queries a tile has: as few as the smallest tile of any kernel, and a divisor of a block."""
    most = min(tiling(kernel, q).block_m for kernel in ("forward", "dq", "dkdv"))
    return most if block is None else largest_tile(block, most)


def slot_tensor(x: Tensor, slots: int, fill: bool) -> tuple[Tensor, dict[str, int]]:
    """A tensor `[B, H, Tq, slots, D]` with its strides; of a single slot it is `[B, Tq, H, D]`."""
    rows, queries, heads, width = x.shape
    if slots == 1:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return y, token_strides("o", y) | {"stride_os": 0}
    shape = rows, heads, queries, slots, width
    y = (torch.zeros if fill else torch.empty)(shape, dtype=x.dtype, device=x.device)
    strides = {"stride_ob": y.stride(0), "stride_oh": y.stride(1), "stride_ot": y.stride(2), "stride_os": y.stride(3)}
    return y, strides


def forward(q: Tensor, k: Tensor, v: Tensor, args: ListArgs) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    rows, queries, heads, head_dim = q.shape
    slots, out_strides = slot_tensor(q, args.slots, fill=False)
    lse = torch.full((rows, heads, queries, args.slots), float("-inf"), dtype=torch.float32, device=q.device)
    launch = args.kernel_args(q, k, v) | args.entry_args() | {"out_ptr": slots, "lse_ptr": lse} | out_strides
    launch_forward((launch["num_tiles"] * heads * rows,), q, launch | args.options("forward", q))
    if args.slots == 1:
        return slots, lse.squeeze(-1)
    out, merged = torch.empty(q.shape, dtype=q.dtype, device=q.device), lse.new_empty(rows, heads, queries)
    sizes = {"num_queries": queries, "num_heads": heads, "rows": rows * heads * queries, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(q), "BLOCK_M": max(1, 4096 // block_d(q)), "SLOTS": args.slots}
    pointers = {"slots_ptr": slots, "slot_lse_ptr": lse, "out_ptr": out, "lse_ptr": merged}
    launch_merge((cdiv(sizes["rows"], sizes["BLOCK_M"]),), q, pointers | sizes | token_strides("o", out))
    return out, merged


def backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, args: ListArgs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    rows, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    delta, dk, dv = torch.empty_like(lse), *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    total, per_program = rows * queries * heads, max(1, 4096 // block_d(q))
    sizes = {"num_queries": queries, "num_heads": heads, "rows": total, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(q), "BLOCK_M": per_program}
    pointers = {"out_ptr": out, "do_ptr": grad, "delta_ptr": delta}
    launch_delta((cdiv(total, per_program),), q, pointers | token_strides("do", grad) | sizes)
    shared = args.kernel_args(q, k, v) | {"do_ptr": grad, "lse_ptr": lse, "delta_ptr": delta}
    shared |= token_strides("do", grad)
    slots, dq_strides = slot_tensor(q, args.slots, fill=True)
    launch = shared | args.entry_args() | {"dq_ptr": slots} | dq_strides
    launch_dq((launch["num_tiles"] * heads * rows,), q, launch | args.options("dq", q))
    lists, options = args.lists, args.options("dkdv", q)
    launch = shared | {"tile_spans_ptr": lists.tile_spans, "tile_entries_ptr": lists.tile_entries}
    launch |= {"stride_tile_spans": row_stride(lists.tile_spans), "stride_tile_entries": row_stride(lists.tile_entries)}
    launch |= {"dk_ptr": dk, "dv_ptr": dv} | token_strides("dk", dk)
    launch_dkdv((cdiv(keys, options["BLOCK_N"]) * kv_heads * rows,), q, launch | options)
    return slots if args.slots == 1 else slots.sum(3).transpose(1, 2).contiguous(), dk, dv


def choose_blocks(q: Tensor, means: Tensor, block: int, top_k: int, offset: int) -> Tensor:
    """The blocks that every query and head attends to, int32 `[B, H, Tq, top_k]`: its own first, -1 for none.

    There are as many mean keys `[B, blocks, K, D]` as blocks of `block` keys; the queries come after `offset` others.
    """
    rows, queries, heads, head_dim = q.shape
    chosen = torch.empty(rows, heads, queries, top_k, dtype=torch.int32, device=q.device)
    rounded, block_m = means.to(q.dtype), SELECT_TILE[q.element_size()]
    args: dict[str, Any] = {"q_ptr": q, "means_ptr": rounded, "rest_ptr": (means - rounded).to(q.dtype)}
    args |= {"chosen_ptr": chosen, "num_queries": queries, "num_heads": heads, "group_size": heads // means.shape[2]}
    args |= {"num_blocks": means.shape[1], "block": block, "offset": offset}
    args |= token_strides("q", q) | token_strides("m", rounded)
    args |= {"HEAD_DIM": head_dim, "BLOCK_D": block_d(q), "BLOCK_M": block_m, "BLOCK_N": block_m}
    args |= {"BLOCK_K": max(2, next_power_of_2(top_k - 1)), "TOP_K": top_k, "HAS_REST": q.dtype != torch.float32}
    launch_select((cdiv(queries, block_m) * heads * rows,), q, args | {"num_warps": 8, "num_stages": 1})
    return chosen
