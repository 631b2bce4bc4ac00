"""Split-K attention of one new token per row over a KV cache, with rotary positions, norms and the cache write fused.

The query heads of a group read their shared keys together. A row's keys are split among programs as evenly as its
length allows, which is read on the device, so that one launch serves all lengths. The last program of a row to finish
combines the partial softmaxes. Keys that fit into one tile are not split, and nothing has to be combined.

A row's slots follow each other in memory, or are in the pages of its row of a page table.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import QKNormArgs, RotaryArgs
from phasor.ops.launch import stride_or_0
from phasor.ops.online_softmax import online_softmax
from phasor.ops.pdl import compute_early, pdl_launch, pdl_start_next, pdl_wait_alone
from phasor.ops.rope.kernels import cos_sin

MAX_SPLITS = 32  # of a row's keys
TARGET_PROGRAMS = 264  # how many keep a large GPU busy
COMBINED = 16384  # numbers of partial results that a program has in registers
LOG2_E = 1.4426950408889634


class KVTiles(NamedTuple):
    """Keys of a tile, the warps that read it, and the number of tiles in flight."""

    block_n: int
    num_warps: int
    num_stages: int


# For heads of 64 features of 16 bits. Larger ones have fewer keys in a tile: where keys are split among programs, one
# holds the keys and values of its first tile in registers while it waits.
TILES = KVTiles(128, 4, 3)


def choose_kv_tiles(head_dim: int, element_size: int) -> KVTiles:
    """The tiles for keys of a width. Where the fewest keys are more bytes than others, fewer tiles are in flight.

    >>> choose_kv_tiles(64, 2).block_n // choose_kv_tiles(128, 2).block_n
    2
    >>> choose_kv_tiles(512, 2), choose_kv_tiles(512, 4)
    (KVTiles(block_n=16, num_warps=4, num_stages=3), KVTiles(block_n=16, num_warps=4, num_stages=2))
    """
    times = max(1, triton.next_power_of_2(head_dim) * element_size // 128)
    block_n = max(16, TILES.block_n // times)
    return TILES._replace(block_n=block_n, num_stages=TILES.num_stages if block_n * times <= TILES.block_n else 2)


@triton.jit
def load_norm_weight(weight_ptr, stride, head, offs_d, mask):
    """A norm's weights; `stride` is 0 where all heads share them."""
    return tl.load(weight_ptr + head * stride + offs_d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_kv(
    k_ptr, v_ptr, pages_ptr, start, stop, held, new_slot, ring_size, sink_slots, sink_tokens, window, stride_t,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile of slots, and which of them are visible: not the slot of the new token.

    With pages the ring has more slots than the window, `held` of all slots have a token, and `window` is None where
    all tokens are visible.
    """
    slots, offs_d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)[None, :]
    visible = (slots < stop) & (slots != new_slot)
    if PAGE_SIZE > 0:
        if window is not None:
            distance = tl.where(slots > new_slot, new_slot + ring_size, new_slot) - slots
            distance = tl.where(slots < sink_slots, held - slots, distance)
            visible = visible & ((distance < window) | (slots < sink_tokens))
        page = tl.load(pages_ptr + slots // PAGE_SIZE, mask=visible, other=0)
        index = page.to(tl.int64) * PAGE_SIZE + slots % PAGE_SIZE
    else:
        index = slots.to(tl.int64)
    offsets, mask = index[:, None] * stride_t + offs_d, visible[:, None] & (offs_d < HEAD_DIM)
    return tl.load(k_ptr + offsets, mask=mask, other=0.0), tl.load(v_ptr + offsets, mask=mask, other=0.0), visible


@triton.jit
def attend_tile(
    q, k, v, visible, scale, bias_ptr, start, stride_bh, stride_bt, acc, l_i, m_i,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the running softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if bias_ptr is not None:
        head, slots = tl.arange(0, BLOCK_M)[:, None], start + tl.arange(0, BLOCK_N)[None, :]
        mask = (head < GROUP_SIZE) & visible[None, :]
        bias = tl.load(bias_ptr + head * stride_bh + slots * stride_bt, mask=mask, other=0.0)
        scores += bias.to(tl.float32) * 1.4426950408889634
    scores = tl.where(visible[None, :], scores, float("-inf"))
    return online_softmax(scores, v, acc, l_i, m_i, MAY_BE_EMPTY=False)


@triton.jit
def load_stats(stats_ptr, first_part, split, head, used_splits, GROUP_SIZE: tl.constexpr):
    """The largest scores and the sums of splits, for the heads of a group."""
    mask, ptrs = (split < used_splits) & (head < GROUP_SIZE), stats_ptr + (first_part + split * GROUP_SIZE + head) * 2
    m = tl.load(ptrs, mask=mask, other=-1e30, cache_modifier=".cg")
    return m, tl.load(ptrs + 1, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_splits"])
def decode_attention_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, pages_ptr, stride_pages, lengths_ptr,
    positions_ptr, increments_ptr, rotary_factor,
    q_norm_ptr, k_norm_ptr, stride_qn, stride_kn, norm_offset, eps, sink_logits_ptr, scale,
    bias_ptr, stride_bb, stride_bh, stride_bt,
    partial_acc_ptr, partial_stats_ptr, arrived_ptr, out_ptr, num_slots, ring_size, sink_tokens, window, num_splits,
    PAGE_SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ADJACENT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_PARTS: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_G is GROUP_SIZE as a power of two; BLOCK_M has room for a group's queries; BLOCK_PARTS splits are combined
    at a time.
    """
    pdl_start_next(USE_PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(lengths_ptr + row)  # tokens before the new one
    held = tl.minimum(length, num_slots).to(tl.int32)
    sink_slots = num_slots - ring_size
    new_slot = tl.where(length < sink_slots, length, sink_slots + (length - sink_slots) % ring_size).to(tl.int32)
    split_size = tl.maximum(tl.cdiv(tl.cdiv(held, num_splits), BLOCK_N), 1) * BLOCK_N
    used_splits = tl.maximum(tl.cdiv(held, split_size), 1)
    if split >= used_splits:
        return

    # Before the wait it reads lengths, pages, phases, weights and, with PREFETCH, its first keys. No kernel since the
    # first one of the step writes them; that one, the embedding lookup, begins when all kernels before it have ended.
    head, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)
    lane, offs_d = tl.arange(0, BLOCK_M), d[None, :]
    q_mask = (head < GROUP_SIZE) & (offs_d < HEAD_DIM)
    k_mask = (head < BLOCK_M) & (offs_d < HEAD_DIM)  # every row of a tile has the key, so that none is exchanged
    if ROTARY_DIM > 0:
        rotary = d < ROTARY_DIM
        if ADJACENT:
            pair, partner, second = d // 2, d ^ 1, d % 2 == 1
        else:
            second = d >= ROTARY_DIM // 2
            pair, partner = d % (ROTARY_DIM // 2), tl.where(second, d - ROTARY_DIM // 2, d + ROTARY_DIM // 2)
        cos, sin = cos_sin(tl.load(positions_ptr + row), tl.load(increments_ptr + pair, mask=rotary, other=0))
        factor = tl.where(rotary, rotary_factor, 1.0)
        cos = compute_early(cos * factor, USE_PDL)[None, :]
        sin = compute_early(tl.where(second, sin, -sin) * factor, USE_PDL)[None, :]
        partner, rotary = partner[None, :], rotary[None, :]
    if q_norm_ptr is not None:
        q_head = kv_head * GROUP_SIZE + head
        q_weight = load_norm_weight(q_norm_ptr, stride_qn, q_head, offs_d, q_mask)
        k_weight = load_norm_weight(k_norm_ptr, stride_kn, kv_head, offs_d, k_mask)
        if ROTARY_DIM > 0:
            q_partner_weight = load_norm_weight(q_norm_ptr, stride_qn, q_head, partner, q_mask & rotary)
            k_partner_weight = load_norm_weight(k_norm_ptr, stride_kn, kv_head, partner, k_mask & rotary)
    if sink_logits_ptr is not None:
        sink_ptrs = sink_logits_ptr + kv_head * GROUP_SIZE + lane
        sink = tl.load(sink_ptrs, mask=lane < GROUP_SIZE, other=0.0).to(tl.float32) * 1.4426950408889634
    offset, first_page_ptr = (row * num_slots * num_kv_heads + kv_head) * HEAD_DIM, pages_ptr
    new_index = new_slot.to(tl.int64)
    if PAGE_SIZE > 0:
        offset, first_page_ptr = kv_head * HEAD_DIM, pages_ptr + row * stride_pages
        new_index = tl.load(first_page_ptr + new_slot // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + new_slot % PAGE_SIZE
    begin, stop = split * split_size, tl.minimum((split + 1) * split_size, held)
    if PREFETCH:
        k, v, visible = load_kv(
            k_cache_ptr + offset, v_cache_ptr + offset, first_page_ptr, begin, stop, held, new_slot,
            ring_size, sink_slots, sink_tokens, window, num_kv_heads * HEAD_DIM,
            PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    pdl_wait_alone(USE_PDL)

    # The queries of the group, and the key in all rows: normalized, then rotated.
    q_ptrs = qkv_ptr + (row * num_kv_heads + kv_head) * (GROUP_SIZE + 2) * HEAD_DIM + head * HEAD_DIM
    k_ptrs = q_ptrs + (GROUP_SIZE - head) * HEAD_DIM
    x = tl.load(q_ptrs + offs_d, mask=q_mask, other=0.0).to(tl.float32)
    new_key = tl.load(k_ptrs + offs_d, mask=k_mask, other=0.0).to(tl.float32)
    new_value = tl.load(k_ptrs + HEAD_DIM + offs_d, mask=k_mask, other=0.0)
    if ROTARY_DIM > 0:
        x_partner = tl.load(q_ptrs + partner, mask=q_mask & rotary, other=0.0).to(tl.float32)
        key_partner = tl.load(k_ptrs + partner, mask=k_mask & rotary, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        q_rstd = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        k_rstd = tl.rsqrt(tl.sum(new_key * new_key, axis=1) / HEAD_DIM + eps)[:, None]
        x *= q_rstd * (norm_offset + q_weight)
        new_key *= k_rstd * (norm_offset + k_weight)
        if ROTARY_DIM > 0:
            x_partner *= q_rstd * (norm_offset + q_partner_weight)
            key_partner *= k_rstd * (norm_offset + k_partner_weight)
    if ROTARY_DIM > 0:
        x = x * cos + x_partner * sin
        new_key = new_key * cos + key_partner * sin
    q, new_key = x.to(qkv_ptr.dtype.element_ty), new_key.to(qkv_ptr.dtype.element_ty)

    # The first program begins with the new token, which it writes to the cache; every one adds its split of the keys.
    first = split == 0
    new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    if bias_ptr is not None:
        bias_ptr += row * stride_bb + kv_head * GROUP_SIZE * stride_bh
        new_bias_ptrs = bias_ptr + lane * stride_bh + new_slot * stride_bt
        new_score += tl.load(new_bias_ptrs, mask=lane < GROUP_SIZE, other=0.0).to(tl.float32) * 1.4426950408889634
    m_i, l_i = new_score, tl.full([BLOCK_M], 1.0, tl.float32)
    acc = new_value.to(tl.float32)
    if sink_logits_ptr is not None:  # a score without a value
        m_i = tl.maximum(new_score, sink)
        new_weight = tl.exp2(new_score - m_i)
        l_i = new_weight + tl.exp2(sink - m_i)
        acc *= new_weight[:, None]
    m_i, l_i, acc = tl.where(first, m_i, -1e30), tl.where(first, l_i, 0.0), tl.where(first, acc, 0.0)
    new_offset = offset + new_index * num_kv_heads * HEAD_DIM + offs_d + head * 0
    new_mask = k_mask & (head + split == 0)  # from the first row of the first program
    if PAGE_SIZE > 0:
        new_mask = new_mask & (new_index >= PAGE_SIZE)  # a row without a page keeps nothing
    tl.store(k_cache_ptr + new_offset, new_key.to(k_cache_ptr.dtype.element_ty), mask=new_mask)
    tl.store(v_cache_ptr + new_offset, new_value, mask=new_mask)
    if PREFETCH:
        acc, l_i, m_i = attend_tile(
            q, k, v, visible, scale, bias_ptr, begin, stride_bh, stride_bt, acc, l_i, m_i,
            GROUP_SIZE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        begin += BLOCK_N
    if begin < stop:  # else the loop's first loads would be prepared for nothing
        for start in tl.range(begin, stop, BLOCK_N, num_stages=NUM_STAGES):
            k, v, visible = load_kv(
                k_cache_ptr + offset, v_cache_ptr + offset, first_page_ptr, start, stop, held, new_slot,
                ring_size, sink_slots, sink_tokens, window, num_kv_heads * HEAD_DIM,
                PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            acc, l_i, m_i = attend_tile(
                q, k, v, visible, scale, bias_ptr, start, stride_bh, stride_bt, acc, l_i, m_i,
                GROUP_SIZE, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    first_head = (row * num_kv_heads + kv_head) * GROUP_SIZE
    if used_splits == 1:
        out_ptrs = out_ptr + (first_head + head) * HEAD_DIM + offs_d
        out_mask = (head < GROUP_SIZE) & (offs_d < HEAD_DIM)
        tl.store(out_ptrs, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        own = first_head * num_splits + split * GROUP_SIZE
        own_acc_ptrs = partial_acc_ptr + (own + head) * HEAD_DIM + offs_d
        tl.store(own_acc_ptrs, acc, mask=(head < GROUP_SIZE) & (offs_d < HEAD_DIM))
        tl.store(partial_stats_ptr + (own + lane) * 2, m_i, mask=lane < GROUP_SIZE)
        tl.store(partial_stats_ptr + (own + lane) * 2 + 1, l_i, mask=lane < GROUP_SIZE)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row * num_kv_heads + kv_head, 1, sem="acq_rel") == used_splits - 1:
            tl.store(arrived_ptr + row * num_kv_heads + kv_head, 0)
            offs_s, offs_g = tl.arange(0, BLOCK_SPLITS)[:, None], tl.arange(0, BLOCK_G)[None, :]
            first_part = first_head * num_splits
            m_parts, l_parts = load_stats(partial_stats_ptr, first_part, offs_s, offs_g, used_splits, GROUP_SIZE)
            last_m = tl.max(m_parts, axis=0)
            total = tl.sum(l_parts * tl.exp2(m_parts - last_m[None, :]), axis=0)
            combined_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for start in tl.range(0, used_splits, BLOCK_PARTS):
                offs_p = start + tl.arange(0, BLOCK_PARTS)[:, None]
                m_share, _ = load_stats(partial_stats_ptr, first_part, offs_p, offs_g, used_splits, GROUP_SIZE)
                weight = tl.exp2(m_share - last_m[None, :]) / total[None, :]
                parts = first_part + offs_p * GROUP_SIZE + offs_g
                acc_mask = ((offs_p < used_splits) & (offs_g < GROUP_SIZE))[:, :, None] & (d < HEAD_DIM)[None, None, :]
                acc_ptrs = partial_acc_ptr + parts[:, :, None] * HEAD_DIM + d[None, None, :]
                acc_parts = tl.load(acc_ptrs, mask=acc_mask, other=0.0, cache_modifier=".cg")
                combined_acc += tl.sum(acc_parts * weight[:, :, None], axis=0)
            group_head = tl.arange(0, BLOCK_G)[:, None]
            combined = combined_acc.to(out_ptr.dtype.element_ty)
            combined_mask = (group_head < GROUP_SIZE) & (offs_d < HEAD_DIM)
            tl.store(out_ptr + (first_head + group_head) * HEAD_DIM + offs_d, combined, mask=combined_mask)


class SplitKWorkspace:
    """Memory for the partial softmaxes of split keys, until they are combined; all layers of a step share one."""

    def __init__(self, rows: int, num_kv_heads: int, group_size: int, head_dim: int, device: torch.device) -> None:
        self.splits = max(1, min(MAX_SPLITS, TARGET_PROGRAMS // (rows * num_kv_heads)))
        parts = rows * num_kv_heads * group_size * self.splits
        self.acc = torch.empty(parts, head_dim, device=device)
        self.stats = torch.empty(parts, 2, device=device)  # m_i and l_i
        self.arrived = torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    positions: Tensor,
    out: Tensor,
    workspace: SplitKWorkspace,
    *,
    scale: float,
    rope: RotaryArgs | None = None,
    qk_norm: QKNormArgs | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
    sink_tokens: int = 0,
    pages: Tensor | None = None,
    window: int | None = None,
    tiles: KVTiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """One token per row: `qkv [B, K * (G + 2) * D]` by group, over a cache `[B, slots, K, D]` that gets its key.

    `lengths [B]` are the tokens that a row's cache has had so far, `positions [B]` those of the new tokens. The first
    `sink_tokens` slots keep their tokens, and the others are a ring buffer. `sink_logits [H]` are scores without a
    value. `bias [B or 1, H, slots]` is added to the scores, with what the new token gets at its slot. The result,
    `[B, H * D]`, is written to `out`.

    With `pages [B, n]` of 32 bits, the slots of a row are those of its pages, one after the other, in a cache
    `[pages, page_size, K, D]`. Whole pages have the sinks, and the ring has room for more than the `window` tokens that
    are visible. A row whose new token falls into page 0 keeps nothing.
    """
    num_slots, num_kv_heads, head_dim = k_cache.shape[1:]
    rows, page_size, stride_pages, ring_size = len(lengths), 0, 0, num_slots - sink_tokens
    if pages is not None:
        page_size, num_slots, stride_pages = num_slots, num_slots * pages.shape[1], pages.stride(0)
        ring_size = num_slots - triton.cdiv(sink_tokens, page_size) * page_size
    group_size = qkv.shape[1] // (num_kv_heads * head_dim) - 2
    tiles = tiles or choose_kv_tiles(head_dim, k_cache.element_size())
    splits = max(1, min(workspace.splits, triton.cdiv(num_slots, tiles.block_n)))
    q_norm, k_norm, offset, eps = qk_norm or (None, None, 0.0, 0.0)
    stride_qn, stride_kn = (head_dim if w is not None and w.dim() == 2 else 0 for w in (q_norm, k_norm))
    increments, factor, rotary_dim, adjacent = rope or (lengths, 1.0, 0, False)
    bias_strides = (0, 0, 0) if bias is None else (stride_or_0(bias, 0), bias.stride(1), bias.stride(2))
    block_g, block_d = triton.next_power_of_2(group_size), max(16, triton.next_power_of_2(head_dim))
    block_splits = triton.next_power_of_2(workspace.splits)
    decode_attention_kernel[(splits, num_kv_heads, rows)](
        qkv, k_cache, v_cache, pages, stride_pages, lengths, positions, increments, factor,
        q_norm, k_norm, stride_qn, stride_kn, offset, eps, sink_logits, scale * LOG2_E,
        bias, *bias_strides,
        workspace.acc, workspace.stats, workspace.arrived, out, num_slots, ring_size, sink_tokens, window, splits,
        PAGE_SIZE=page_size, GROUP_SIZE=group_size, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, ADJACENT=adjacent,
        BLOCK_G=block_g, BLOCK_M=max(16, block_g), BLOCK_D=block_d, BLOCK_N=tiles.block_n, BLOCK_SPLITS=block_splits,
        BLOCK_PARTS=min(block_splits, max(1, COMBINED // (block_g * block_d))), NUM_STAGES=tiles.num_stages,
        PREFETCH=workspace.splits > 1, USE_PDL=pdl, num_warps=tiles.num_warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
