"""The Triton kernels of attention of one query per row, whose keys are split among programs and then combined."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.attention.split_keys_args import SplitKeysArgs
from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2, stride_or_0
from phasor.ops.online_softmax import online_softmax
from phasor.ops.pdl import pdl_wait

MAX_SPLITS = 64
TARGET_PROGRAMS = 264  # how many keep a large GPU busy
TILE_BYTES = 1 << 15  # of the keys and values of a tile
MAX_BLOCK_M = 64
COMBINED_FEATURES = 64


class SplitKeysTiles(NamedTuple):
    """Heads and keys of a tile, the warps that compute it, and the number of tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_split_keys_tiles(group_size: int, value_dim: int, element_size: int, *, shared: bool) -> SplitKeysTiles:
    """The tiles for heads that share keys and values, `shared` where values are a part of the keys.

    >>> choose_split_keys_tiles(16, 512, 2, shared=True)
    SplitKeysTiles(block_m=16, block_n=32, num_warps=4, num_stages=2)
    >>> choose_split_keys_tiles(4, 128, 2, shared=False).block_n
    64
    """
    block_m = max(16, min(MAX_BLOCK_M, next_power_of_2(group_size)))
    keys = TILE_BYTES // (next_power_of_2(value_dim) * element_size * (1 if shared else 2))
    return SplitKeysTiles(block_m, max(16, min(128, keys)), 8 if block_m == MAX_BLOCK_M else 4, 2)


@triton.jit(do_not_specialize=["num_splits"])
def split_keys_kernel(
    q_ptr, k_ptr, v_ptr, visible_ptr, bias_ptr, last_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    scale, softcap, num_keys, num_heads, group_size, head_tiles, num_splits,
    stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_mb, stride_bb, stride_bh, stride_bt, stride_lb,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, USE_SHARED: tl.constexpr, USE_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of the heads that share a key, over one split of a row's keys: its average of values, and its logsumexp.

    With USE_SHARED the values are the last features of the keys, are read once for both, and KEY_DIM are the others.
    """
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, tile = tl.program_id(1) // head_tiles, tl.program_id(1) % head_tiles
    held = num_keys
    if last_ptr is not None:
        held = tl.minimum(tl.load(last_ptr + row * stride_lb) + 1, num_keys).to(tl.int32)
    split_size = tl.maximum(tl.cdiv(tl.cdiv(held, num_splits), BLOCK_N), 1) * BLOCK_N
    begin, stop = split * split_size, tl.minimum((split + 1) * split_size, held)

    in_group = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head, real = kv_head * group_size + in_group, in_group < group_size
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_ptrs = q_ptr + row * stride_qb + head[:, None] * stride_qh
    q = tl.load(q_ptrs + offs_k[None, :], mask=real[:, None] & (offs_k < KEY_DIM)[None, :], other=0.0)
    if USE_SHARED:
        q_mask = real[:, None] & (offs_v < VALUE_DIM)[None, :]
        q_value = tl.load(q_ptrs + KEY_DIM + offs_v[None, :], mask=q_mask, other=0.0)
    k_ptr += row * stride_kb + kv_head * stride_kh
    v_ptr += row * stride_vb + kv_head * stride_vh

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sink_logits_ptr is not None:  # scores without a value, in the first split
        sink = tl.load(sink_logits_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        m_i, l_i = tl.where(split == 0, sink, m_i), tl.where(split == 0, l_i + 1.0, l_i)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=NUM_STAGES):
        slots = start + tl.arange(0, BLOCK_N)
        visible, rows = slots < stop, slots.to(tl.int64)[:, None]
        k_mask = visible[:, None] & (offs_k < KEY_DIM)[None, :]
        k = tl.load(k_ptr + rows * stride_kt + offs_k[None, :], mask=k_mask, other=0.0)
        v_mask = visible[:, None] & (offs_v < VALUE_DIM)[None, :]
        v = tl.load(v_ptr + rows * stride_vt + offs_v[None, :], mask=v_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if USE_SHARED:
            scores = tl.dot(q_value, tl.trans(v), scores, input_precision="ieee")
        scores *= scale
        if USE_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + row * stride_bb + head[:, None] * stride_bh + slots[None, :] * stride_bt
            scores += tl.load(bias_ptrs, mask=real[:, None] & visible[None, :], other=0.0).to(tl.float32)
        if visible_ptr is not None:
            visible &= tl.load(visible_ptr + row * stride_mb + slots, mask=visible, other=0) != 0
        scores = tl.where(visible[None, :], scores * 1.4426950408889634, float("-inf"))
        acc, l_i, m_i = online_softmax(scores, v, acc, l_i, m_i, MAY_BE_EMPTY=True)

    part = (row * num_heads + head) * num_splits + split
    empty = l_i == 0.0
    y = acc / tl.where(empty, 1.0, l_i)[:, None]
    out_mask = real[:, None] & (offs_v < VALUE_DIM)[None, :]
    tl.store(out_ptr + part[:, None] * VALUE_DIM + offs_v[None, :], y.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))
        tl.store(lse_ptr + part, lse, mask=real)


@triton.jit
def combine_splits_kernel(
    parts_ptr, lse_ptr, out_ptr, num_splits,
    VALUE_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The average of the splits of one head of a row, by their weights in the softmax; zeros where all are empty.

    Those with a logsumexp of -inf are empty, and what they hold is not read.
    """
    head, offs_s = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_SPLITS)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    pdl_wait(USE_PDL)
    lse = tl.load(lse_ptr + head * num_splits + offs_s, mask=offs_s < num_splits, other=float("-inf"))
    real = lse != float("-inf")
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    ptrs = parts_ptr + (head * num_splits + offs_s)[:, None] * VALUE_DIM + offs_v[None, :]
    parts = tl.load(ptrs, mask=real[:, None] & (offs_v < VALUE_DIM)[None, :], other=0.0)
    y = tl.sum(parts * weight[:, None], 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * VALUE_DIM + offs_v, y, mask=offs_v < VALUE_DIM)


SPLIT_KEYS = KernelLauncher(split_keys_kernel)
COMBINE_SPLITS = KernelLauncher(combine_splits_kernel)


def forward(args: SplitKeysArgs, tiles: SplitKeysTiles | None = None) -> Tensor:
    """What `split_keys_op` returns; `tiles` are chosen unless given."""
    q, k, v = args.q, args.k, args.v
    (rows, num_heads, key_dim), (num_keys, kv_heads), value_dim = q.shape, k.shape[1:3], v.shape[-1]
    group_size, shared = num_heads // kv_heads, values_are_in_keys(k, v)
    apart = key_dim - value_dim if shared else key_dim
    tiles = tiles or choose_split_keys_tiles(group_size, value_dim, k.element_size(), shared=shared)
    head_tiles = cdiv(group_size, tiles.block_m)
    programs = TARGET_PROGRAMS // (rows * kv_heads * head_tiles)
    splits = max(1, min(MAX_SPLITS, programs, cdiv(num_keys, tiles.block_n)))
    out = torch.empty(rows, num_heads, value_dim, device=q.device, dtype=q.dtype)
    parts, lse = out, None
    if splits > 1:
        parts = torch.empty(rows, num_heads, splits, value_dim, device=q.device, dtype=torch.float32)
        lse = parts.new_empty(rows, num_heads, splits)
    tensors = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "visible_ptr": args.visible, "bias_ptr": args.bias}
    tensors |= {"last_ptr": args.last, "sink_logits_ptr": args.sink_logits, "out_ptr": parts, "lse_ptr": lse}
    strides: dict[str, Any] = {}
    for names, x in (("qb qh", q), ("kb kt kh", k), ("vb vt vh", v), ("mb", args.visible), ("bb bh bt", args.bias)):
        strides |= {f"stride_{name}": 0 if x is None else stride_or_0(x, i) for i, name in enumerate(names.split())}
    SPLIT_KEYS(
        q, tensors, (splits, kv_heads * head_tiles, rows), scale=args.scale, softcap=args.softcap or 1.0,
        num_keys=num_keys, num_heads=num_heads, group_size=group_size, head_tiles=head_tiles, num_splits=splits,
        **strides, stride_lb=0 if args.last is None else stride_or_0(args.last, 0),
        KEY_DIM=apart, VALUE_DIM=value_dim, USE_SHARED=shared, USE_SOFTCAP=args.softcap > 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=max(16, next_power_of_2(apart)),
        BLOCK_V=max(16, next_power_of_2(value_dim)), NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if lse is not None:
        grid = rows * num_heads, cdiv(value_dim, COMBINED_FEATURES)
        COMBINE_SPLITS(
            q, {"parts_ptr": parts, "lse_ptr": lse, "out_ptr": out}, grid, num_splits=splits,
            VALUE_DIM=value_dim, BLOCK_SPLITS=next_power_of_2(splits), BLOCK_V=COMBINED_FEATURES, USE_PDL=False,
        )  # fmt: skip
    return out


def values_are_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether values are the last features of the keys, in the same memory.

    >>> kept = torch.zeros(2, 5, 1, 8)
    >>> values_are_in_keys(kept, kept[..., 3:]), values_are_in_keys(kept, kept[..., :5])
    (True, False)
    """
    apart = k.shape[-1] - v.shape[-1]
    return apart > 0 and k.stride() == v.stride() and v.data_ptr() == k.data_ptr() + apart * k.element_size()
