"""The rows of a KV cache in the order of the beams that go on: in place, and only the slots that hold a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def reorder_cache_kernel(
    k_ptr, v_ptr, order_ptr, counts_ptr, beams, num_slots, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One slot of the rows of one search, BLOCK_N of its N features: all are read before the first is written."""
    slot, search = tl.program_id(0), tl.program_id(1)
    beam, offs_n = tl.arange(0, BLOCK_M), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = search * beams + beam
    if slot >= tl.load(counts_ptr + search * beams):
        return
    source = tl.load(order_ptr + row, mask=beam < beams, other=0)
    if tl.sum(tl.where((beam < beams) & (source != row), 1, 0)) == 0:
        return
    mask = (beam < beams)[:, None] & (offs_n < N)[None, :]
    read = (source * num_slots + slot)[:, None] * N + offs_n[None, :]
    write = (row.to(tl.int64) * num_slots + slot)[:, None] * N + offs_n[None, :]
    k, v = tl.load(k_ptr + read, mask=mask, other=0.0), tl.load(v_ptr + read, mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(k_ptr + write, k, mask=mask)
    tl.store(v_ptr + write, v, mask=mask)


def reorder_cache(keys: Tensor, values: Tensor, order: Tensor, counts: Tensor, beams: int) -> None:
    """Let row `i` of a cache `[B, slots, K, D]` continue from row `order[i]`, one of the same `beams` rows.

    `counts [B]` are the tokens that a row's cache has had so far, the same for all beams of a search.
    """
    rows, num_slots, num_kv_heads, head_dim = keys.shape
    features, block_m = num_kv_heads * head_dim, triton.next_power_of_2(beams)
    block_n = min(triton.next_power_of_2(features), max(64, 8192 // block_m))
    grid = (num_slots, rows // beams, triton.cdiv(features, block_n))
    reorder_cache_kernel[grid](
        keys, values, order, counts, beams, num_slots, features, BLOCK_M=block_m, BLOCK_N=block_n
    )
