"""Split-K attention of one new token per row over a KV cache, with rotary positions, norms and the cache write fused.

The query heads of a group read their shared keys together. A row's keys are split among programs as evenly as its
length allows, which is read on the device, so that one launch serves all lengths. Another kernel combines the partial
softmaxes. Keys that fit into one tile are not split, and nothing has to be combined.

A row's slots follow each other in memory, or are in the pages of its row of a page table.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.attention.split_keys_kernel import COMBINED_FEATURES, combine_splits_kernel
from phasor.ops.decode.arguments import QKNormArgs, RotaryArgs
from phasor.ops.launch import stride_or_0
from phasor.ops.online_softmax import online_softmax
from phasor.ops.pdl import compute_early, pdl_launch, pdl_start_next, pdl_wait_alone
from phasor.ops.rope.kernels import cos_sin

MAX_SPLITS = 64  # of a row's keys
TARGET_FEATURES = 528 * 128  # of the heads of all programs: as many programs keep a large GPU busy
LOG2_E = 1.4426950408889634


class KVTiles(NamedTuple):
    """Keys of a tile, the warps that read it, and the number of tiles in flight."""

    block_n: int
    num_warps: int
    num_stages: int


# For heads of 64 features of 16 bits; larger ones have fewer keys in a tile.
TILES = KVTiles(128, 4, 3)


def choose_kv_tiles(head_dim: int, element_size: int, *, split: bool = False) -> KVTiles:
    """The tiles for keys of a width. Where the fewest keys are more bytes than others, fewer tiles are in flight, and
    for keys that are split among programs too: each holds its first tile in registers while it waits.

    >>> choose_kv_tiles(64, 2).block_n // choose_kv_tiles(128, 2).block_n
    2
    >>> choose_kv_tiles(512, 2), choose_kv_tiles(512, 4)
    (KVTiles(block_n=16, num_warps=4, num_stages=3), KVTiles(block_n=16, num_warps=4, num_stages=2))
    >>> choose_kv_tiles(128, 2, split=True), choose_kv_tiles(256, 2, split=True)
    (KVTiles(block_n=64, num_warps=4, num_stages=2), KVTiles(block_n=32, num_warps=4, num_stages=3))
    """
    times = max(1, triton.next_power_of_2(head_dim) * element_size // 128)
    block_n = max(16, TILES.block_n // times)
    fewer = block_n * times > TILES.block_n or (split and times <= 2)
    return TILES._replace(block_n=block_n, num_stages=min(2, TILES.num_stages) if fewer else TILES.num_stages)


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


@triton.jit(do_not_specialize=["num_splits"])
def decode_attention_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, pages_ptr, stride_pages, lengths_ptr,
    positions_ptr, increments_ptr, rotary_factor,
    q_norm_ptr, k_norm_ptr, stride_qn, stride_kn, norm_offset, eps, sink_logits_ptr, scale,
    bias_ptr, stride_bb, stride_bh, stride_bt,
    out_ptr, lse_ptr, num_slots, ring_size, sink_tokens, window, num_splits,
    PAGE_SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ADJACENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The queries of a group over one split of a row's keys: their averages of values, and with `lse_ptr` their
    logsumexps to base 2. BLOCK_M has room for a group's queries.
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
    first_head = (row * num_kv_heads + kv_head) * GROUP_SIZE
    lane = tl.arange(0, BLOCK_M)
    part = (first_head + lane) * num_splits + split
    if lse_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if split >= used_splits:  # without keys
            pdl_wait_alone(USE_PDL)
            tl.store(lse_ptr + part, float("-inf"), mask=lane < GROUP_SIZE)
            return

    # Before the wait it reads lengths, pages, phases, weights and, with PREFETCH, its first keys. No kernel since the
    # first one of the step writes them; that one, the embedding lookup, begins when all kernels before it have ended.
    head, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)
    offs_d = d[None, :]
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

    weight = tl.where(l_i == 0.0, 1.0, l_i)
    out_ptrs = out_ptr + part[:, None] * HEAD_DIM + offs_d
    tl.store(out_ptrs, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + part, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(weight)), mask=lane < GROUP_SIZE)


class SplitKWorkspace:
    """Memory for the partial softmaxes of split keys, until they are combined; all layers of a step share one."""

    def __init__(self, rows: int, num_kv_heads: int, group_size: int, head_dim: int, device: torch.device) -> None:
        features = max(128, head_dim)
        self.splits = max(1, min(MAX_SPLITS, TARGET_FEATURES // (rows * num_kv_heads * features)))
        parts = rows * num_kv_heads * group_size * self.splits
        self.parts = torch.empty(parts, head_dim, device=device)
        self.lse = torch.empty(parts, device=device)


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
    tiles = tiles or choose_kv_tiles(head_dim, k_cache.element_size(), split=workspace.splits > 1)
    splits = max(1, min(workspace.splits, triton.cdiv(num_slots, tiles.block_n)))
    q_norm, k_norm, offset, eps = qk_norm or (None, None, 0.0, 0.0)
    stride_qn, stride_kn = (head_dim if w is not None and w.dim() == 2 else 0 for w in (q_norm, k_norm))
    increments, factor, rotary_dim, adjacent = rope or (lengths, 1.0, 0, False)
    bias_strides = (0, 0, 0) if bias is None else (stride_or_0(bias, 0), bias.stride(1), bias.stride(2))
    parts, lse = (workspace.parts, workspace.lse) if splits > 1 else (out, None)
    decode_attention_kernel[(splits, num_kv_heads, rows)](
        qkv, k_cache, v_cache, pages, stride_pages, lengths, positions, increments, factor,
        q_norm, k_norm, stride_qn, stride_kn, offset, eps, sink_logits, scale * LOG2_E,
        bias, *bias_strides,
        parts, lse, num_slots, ring_size, sink_tokens, window, splits,
        PAGE_SIZE=page_size, GROUP_SIZE=group_size, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, ADJACENT=adjacent,
        BLOCK_M=max(16, triton.next_power_of_2(group_size)), BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=tiles.block_n, NUM_STAGES=tiles.num_stages, PREFETCH=workspace.splits > 1, USE_PDL=pdl,
        num_warps=tiles.num_warps, **pdl_launch(pdl),
    )  # fmt: skip
    if splits > 1:
        combine_splits_kernel[rows * num_kv_heads * group_size, triton.cdiv(head_dim, COMBINED_FEATURES)](
            parts, lse, out, splits,
            VALUE_DIM=head_dim, BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_V=COMBINED_FEATURES,
            USE_PDL=pdl, **pdl_launch(pdl),
        )  # fmt: skip
    return out
