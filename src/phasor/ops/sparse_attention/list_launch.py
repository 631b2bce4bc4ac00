"""Launches of the kernels over lists of key blocks, and of the choice of blocks by score."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasor.ops.attention import flash_hopper
from phasor.ops.attention.flash_launch import contiguous_features, output_dot_gradient, row_stride, token_strides
from phasor.ops.attention.flash_tiles import Tiling, block_d, tiling
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense, next_power_of_2
from phasor.ops.sparse_attention.list_dkdv_kernel import list_dkdv_kernel
from phasor.ops.sparse_attention.list_kernels import (
    block_forward_kernel,
    list_dq_kernel,
    list_forward_kernel,
    merge_kernel,
    sum_kernel,
)
from phasor.ops.sparse_attention.select_kernel import select_kernel
from phasor.ops.sparse_attention.tile_lists import TileLists, largest_tile

launch_forward = KernelLauncher(list_forward_kernel)
launch_merge, launch_sum = KernelLauncher(merge_kernel), KernelLauncher(sum_kernel)
launch_dq, launch_dkdv = KernelLauncher(list_dq_kernel), KernelLauncher(list_dkdv_kernel)
launch_select, launch_block_forward = KernelLauncher(select_kernel), KernelLauncher(block_forward_kernel)
SELECT_TILE = {2: 64, 4: 32}  # queries and blocks whose scores a program of the choice holds, by bytes per element
MAX_ONE_TILE = 128  # blocks that are chosen from at once
# The most keys of a block, and bytes of them and of their values each, that a program holds while queries go by.
MAX_HELD_KEYS, MAX_HELD_BYTES = 128, 1 << 15
MAX_HELD_TILES, MIN_PROGRAMS = 16, 2048  # tiles of queries that go by, unless programs become fewer
# Queries that chose one block read the same keys, all of them: as many as registers hold.
WIDE_FORWARD = Tiling(128, 64, 8, 3)
MIN_HOPPER_KEYS = 256  # of a block: fewer are done before warps take turns


@dataclass(frozen=True)
class ListArgs:
    """What all kernels over lists take: blocks of `block` keys, `slots` per query, queries after `offset` others.

    Tiles are of up to `block_m` queries, each of `one_block` or of a list of them. Queries `chosen` by score have slots
    that are not used.
    """

    lists: TileLists
    block_m: int
    block: int
    slots: int
    offset: int
    causal: bool
    scale: float
    one_block: bool
    chosen: Tensor | None = None

    def scalars(self, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """The scalars that the `"forward"`, `"dq"` and `"dkdv"` kernels share, and the options of that one."""
        tiles = selected_tiling(q, self.block) if kernel == "forward" and self.one_block else tiling(kernel, q)
        (_, queries, heads, head_dim), (_, keys, kv_heads, _) = q.shape, k.shape
        return {
            "num_queries": queries, "num_keys": keys, "num_heads": heads, "group_size": heads // kv_heads,
            "offset": self.offset, "scale": self.scale, **token_strides("q", q.stride()),
            **token_strides("k", k.stride()), **token_strides("v", v.stride()),
            "stride_pairs": row_stride(self.lists.pairs), "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim),
            "BLOCK_M": self.block_m, "BLOCK_N": largest_tile(self.block, tiles.block_n), "BLOCK": self.block,
            "SLOTS": self.slots, "CAUSAL": self.causal, "ONE_BLOCK": self.one_block,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        }  # fmt: skip

    def list_scalars(self) -> dict[str, int]:
        """The scalars of the lists of key blocks of every tile."""
        lists = self.lists
        strides = {"stride_spans": row_stride(lists.spans), "stride_entries": row_stride(lists.entries)}
        return {"num_tiles": lists.spans.shape[1], **strides}


def tile_queries(q: Tensor, block: int) -> int:
    """How many queries a tile of neighbors has: as few as the smallest of any kernel, and a divisor of a block."""
    return largest_tile(block, min(tiling(kernel, q).block_m for kernel in ("forward", "dq", "dkdv")))


def holds_block(q: Tensor, block: int) -> bool:
    """Whether a program holds the keys and values of a whole block while queries go by."""
    size = block * block_d(q.shape[-1]) * q.element_size()
    return block & (block - 1) == 0 and block <= MAX_HELD_KEYS and size <= MAX_HELD_BYTES


def hopper_takes(q: Tensor, k: Tensor, v: Tensor, block: int) -> bool:
    """Whether the kernel for Hopper GPUs computes the forward over queries that chose one block."""
    return (
        block >= MIN_HOPPER_KEYS
        and block % flash_hopper.BLOCK_N == 0
        and q.element_size() == 2
        and q.shape[-1] in flash_hopper.HEAD_DIMS
        and flash_hopper.is_available(q.device)
        and flash_hopper.suits_tma(k)
        and flash_hopper.suits_tma(v)
    )


@functools.cache
def hopper_launcher() -> KernelLauncher:
    """The launcher of that kernel, whose language is imported with it."""
    from phasor.ops.sparse_attention.list_hopper_kernel import block_hopper_kernel

    return KernelLauncher(block_hopper_kernel)


def hopper_forward(q: Tensor, tensors: dict[str, Any], k: Tensor, v: Tensor, scalars: dict[str, Any]) -> None:
    """Launch it, on the tensors and scalars of the kernel over lists."""
    launch, block_n = hopper_launcher(), flash_hopper.BLOCK_N
    descs = {"k_desc": flash_hopper.describe_tokens(k, block_n), "v_desc": flash_hopper.describe_tokens(v, block_n)}
    options = {"BLOCK_N": block_n, "NUM_STAGES": flash_hopper.NUM_STAGES}
    names = launch.kernel.arg_names
    grid = (scalars["num_tiles"] * q.shape[2] * q.shape[0],)
    taken = {name: value for name, value in (scalars | options).items() if name in names}
    launch(q, descs | {name: x for name, x in tensors.items() if name in names}, grid, **taken, num_warps=4)


def selected_tiling(q: Tensor, block: int) -> Tiling:
    """The tiling of the forward over queries that chose one block."""
    wide = q.element_size() == 2 and block_d(q.shape[-1]) <= 128 and not holds_block(q, block)
    return WIDE_FORWARD if wide else tiling("forward", q)


def selected_tile(kernel: str, q: Tensor, block: int, top_k: int) -> int:
    """How many queries that chose one block are a tile of the `"forward"` or the `"dq"` kernel."""
    if kernel != "forward":
        return tiling(kernel, q).block_m
    block_m = selected_tiling(q, block).block_m
    if not holds_block(q, block):
        return block_m
    programs = q.shape[0] * q.shape[1] * q.shape[2] * top_k // (block_m * MIN_PROGRAMS)
    return block_m * min(MAX_HELD_TILES, next_power_of_2(max(1, programs)))


def slot_tensor(x: Tensor, slots: int) -> tuple[Tensor, dict[str, int]]:
    """A tensor `[B, H, Tq, slots, D]` with its strides; of a single slot it is `[B, Tq, H, D]`."""
    rows, queries, heads, width = x.shape
    if slots == 1:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return y, token_strides("o", y.stride()) | {"stride_os": 0}
    shape = rows, heads, queries, slots, width
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    strides = {"stride_ob": y.stride(0), "stride_oh": y.stride(1), "stride_ot": y.stride(2), "stride_os": y.stride(3)}
    return y, strides


def forward(q: Tensor, k: Tensor, v: Tensor, args: ListArgs) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    (rows, queries, heads, _), lists = q.shape, args.lists
    slots, out_strides = slot_tensor(q, args.slots)
    lse = torch.full((rows, heads, queries, args.slots), float("-inf"), dtype=torch.float32, device=q.device)
    tensors: dict[str, Tensor | None] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": slots, "lse_ptr": lse}
    tensors |= {"pairs_ptr": lists.pairs, "spans_ptr": lists.spans, "entries_ptr": lists.entries}
    scalars = args.scalars("forward", q, k, v) | args.list_scalars() | out_strides
    grid = (scalars["num_tiles"] * heads * rows,)
    if args.one_block and holds_block(q, args.block):
        scalars["BLOCK_M"] = selected_tiling(q, args.block).block_m
        for unused in ("BLOCK_N", "CAUSAL", "ONE_BLOCK"):
            del scalars[unused]
        launch_block_forward(q, tensors, grid, **scalars)
    elif args.one_block and hopper_takes(q, k, v, args.block):
        hopper_forward(q, tensors, k, v, scalars)
    else:
        launch_forward(q, tensors, grid, **scalars)
    if args.slots == 1:
        return slots, lse.squeeze(-1)
    out, merged = empty_dense(q), lse.new_empty(rows, heads, queries)
    tensors = {"slots_ptr": slots, "slot_lse_ptr": lse, "out_ptr": out, "lse_ptr": merged}
    programs, scalars = over_slots(out, args.slots)
    launch_merge(q, tensors, programs, **scalars)
    return out, merged


def over_slots(out: Tensor, slots: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The grid and the scalars of a kernel that makes outputs `[B, Tq, H, D]` of their slots."""
    rows, queries, heads, head_dim = out.shape
    total, per_program = rows * heads * queries, max(1, 4096 // block_d(head_dim))
    scalars = {"num_queries": queries, "num_heads": heads, "rows": total, **token_strides("o", out.stride())}
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": per_program, "SLOTS": slots}
    return (cdiv(total, per_program),), scalars | sizes


def backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, args: ListArgs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    (rows, _, heads, _), (_, keys, kv_heads, _), lists = q.shape, k.shape, args.lists
    grad = contiguous_features(grad)
    grad_strides = token_strides("do", grad.stride())
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    delta = output_dot_gradient(out, grad, lse)
    shared: dict[str, Tensor | None] = {"q_ptr": q, "k_ptr": k, "v_ptr": v}
    shared |= {"do_ptr": grad, "lse_ptr": lse, "delta_ptr": delta}
    slots, dq_strides = slot_tensor(q, args.slots)
    tensors = {**shared, "dq_ptr": slots, "pairs_ptr": lists.pairs}
    tensors |= {"spans_ptr": lists.spans, "entries_ptr": lists.entries}
    scalars = args.scalars("dq", q, k, v) | args.list_scalars() | grad_strides | dq_strides
    launch_dq(q, tensors, (scalars["num_tiles"] * heads * rows,), **scalars)
    tensors = {**shared, "dk_ptr": dk, "dv_ptr": dv, "pairs_ptr": lists.pairs}
    tensors |= {"block_spans_ptr": lists.block_spans, "block_entries_ptr": lists.block_entries}
    scalars = args.scalars("dkdv", q, k, v) | grad_strides | token_strides("dk", dk.stride())
    scalars |= {"stride_block_spans": row_stride(lists.block_spans)}
    scalars |= {"stride_block_entries": row_stride(lists.block_entries)}
    if args.one_block:  # its pairs are read as they come
        scalars["BLOCK_M"] = tiling("dkdv", q).block_m
    launch_dkdv(q, tensors, (cdiv(keys, scalars["BLOCK_N"]) * kv_heads * rows,), **scalars)
    if args.slots == 1:
        return slots, dk, dv
    dq = empty_dense(q)
    programs, scalars = over_slots(dq, args.slots)
    launch_sum(q, {"slots_ptr": slots, "chosen_ptr": args.chosen, "out_ptr": dq}, programs, **scalars)
    return dq, dk, dv


def choose_blocks(q: Tensor, means: Tensor, block: int, top_k: int, offset: int) -> Tensor:
    """The blocks that every query and head attends to, int32 `[B, H, Tq, top_k]`: its own first, -1 for none.

    There are as many mean keys `[B, blocks, K, D]` as blocks of `block` keys; the queries come after `offset` others.
    """
    rows, queries, heads, head_dim = q.shape
    chosen = torch.empty(rows, heads, queries, top_k, dtype=torch.int32, device=q.device)
    rounded, block_m = means.to(q.dtype), SELECT_TILE[q.element_size()]
    one_tile = means.shape[1] <= MAX_ONE_TILE
    tensors = {"q_ptr": q, "means_ptr": rounded, "rest_ptr": (means - rounded).to(q.dtype), "chosen_ptr": chosen}
    launch_select(
        q, tensors, (cdiv(queries, block_m) * heads * rows,), num_queries=queries, num_heads=heads,
        group_size=heads // means.shape[2], num_blocks=means.shape[1], block=block, offset=offset,
        **token_strides("q", q.stride()), **token_strides("m", rounded.stride()), HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim), BLOCK_M=block_m, BLOCK_K=max(2, next_power_of_2(top_k - 1)), TOP_K=top_k,
        BLOCK_N=max(16, next_power_of_2(means.shape[1])) if one_tile else block_m, HAS_REST=q.dtype != torch.float32,
        ONE_TILE=one_tile, num_warps=4, num_stages=1,
    )  # fmt: skip
    return chosen
