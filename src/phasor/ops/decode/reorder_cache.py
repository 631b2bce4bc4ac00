"""The rows of a KV cache in the order of the beams that go on: in place, and only the slots that hold a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def reorder_cache_kernel(
    x_ptr, y_ptr, order_ptr, counts_ptr, beams, num_slots, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One slot of the rows of one search, BLOCK_N of its N features: all are read before the first is written.

    The second tensor `y` may be missing.
    """
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
    x = tl.load(x_ptr + read, mask=mask, other=0)
    if y_ptr is not None:
        y = tl.load(y_ptr + read, mask=mask, other=0)
    tl.debug_barrier()
    tl.store(x_ptr + write, x, mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + write, y, mask=mask)


def reorder_cache(tensors: Sequence[Tensor], order: Tensor, counts: Tensor, beams: int) -> None:
    """Let row `i` of tensors of a cache, `[B, slots, ...]`, continue from row `order[i]`, one of the same `beams` rows.

    `counts [B]` are the tokens that a row's cache has had so far, the same for all beams of a search.
    """
    left = list(tensors)
    while left:
        x, y = left.pop(0), None
        if left and left[0].shape == x.shape and left[0].dtype == x.dtype:
            y = left.pop(0)  # keys and values in one launch
        rows, num_slots = x.shape[:2]
        features, block_m = x[0, 0].numel(), triton.next_power_of_2(beams)
        block_n = min(triton.next_power_of_2(features), max(64, 8192 // block_m))
        grid = (num_slots, rows // beams, triton.cdiv(features, block_n))
        reorder_cache_kernel[grid](x, y, order, counts, beams, num_slots, features, BLOCK_M=block_m, BLOCK_N=block_n)
