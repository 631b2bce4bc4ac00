"""The choice of blocks by score: one program per block of queries of one head, over the mean keys of all blocks."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.attention.flash_tiles import load_tile, query_block


@triton.jit
def select_kernel(q_ptr, means_ptr, rest_ptr, chosen_ptr, num_queries, num_heads, group_size, num_blocks, block, offset,
                  stride_qb, stride_qt, stride_qh, stride_mb, stride_mt, stride_mh,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, TOP_K: tl.constexpr, HAS_REST: tl.constexpr,
                  ONE_TILE: tl.constexpr):  # fmt: skip
    """The blocks that queries attend to, `[B, H, Tq, TOP_K]`: their own, then those of highest score; -1 for none.

    The best BLOCK_K blocks so far are kept while the mean keys go by, BLOCK_N at a time, of equal ones the
    lowest. A tile has as many rounds as it has blocks that enter the best of any one query. With ONE_TILE all blocks
    are in it, and those are chosen that score no less than the last of the highest scores. Means of half precision
    have a rest that their rounding left, so that scores are those of precise means.
    """
    block_id, head, batch, offs_m = query_block(num_queries, num_heads, BLOCK_M)
    valid_m = offs_m < num_queries
    own = (offs_m + offset) // block
    chosen_ptr += ((batch * num_heads + head) * num_queries + offs_m) * TOP_K
    tl.store(chosen_ptr, own, mask=valid_m)
    if TOP_K > 1:
        q_ptr += batch * stride_qb + head * stride_qh
        q = load_tile(q_ptr, block_id * BLOCK_M, stride_qt, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, False)
        means_ptr += batch * stride_mb + (head // group_size) * stride_mh
        if HAS_REST:
            rest_ptr += batch * stride_mb + (head // group_size) * stride_mh
        offs_n, offs_k = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)[None, :]
        if not ONE_TILE:
            unused = tl.where(offs_k < TOP_K - 1, float("-inf"), float("inf"))
            best = tl.zeros([BLOCK_M, BLOCK_K], tl.float32) + unused
            number = tl.zeros([BLOCK_M, BLOCK_K], tl.int32) + num_blocks + offs_k  # of empty slots, all different
        for start in range(0, BLOCK_N if ONE_TILE else tl.max(own), BLOCK_N):
            means = load_tile(means_ptr, start, stride_mt, num_blocks, BLOCK_N, BLOCK_D, HEAD_DIM, False)
            scores = tl.dot(q, tl.trans(means), input_precision="ieee")
            if HAS_REST:
                rest = load_tile(rest_ptr, start, stride_mt, num_blocks, BLOCK_N, BLOCK_D, HEAD_DIM, False)
                scores = tl.dot(q, tl.trans(rest), scores, input_precision="ieee")
            scores = tl.where(start + offs_n < own[:, None], scores, float("-inf"))
            if ONE_TILE:
                least = tl.max(scores, 1)
                for _ in range(TOP_K - 2):
                    least = tl.max(tl.where(scores < least[:, None], scores, float("-inf")), 1)
                shown = (scores >= least[:, None]) & (scores > float("-inf"))
                if tl.max(tl.sum(shown.to(tl.int32), 1)) > TOP_K - 1:  # equal scores, which were counted once
                    shown = scores == float("inf")
                    for _ in range(TOP_K - 1):
                        top, place = tl.max(scores, 1, return_indices=True)
                        taken = (offs_n == place[:, None]) & (top > float("-inf"))[:, None]
                        shown |= taken
                        scores = tl.where(taken, float("-inf"), scores)
                slot = tl.cumsum(shown.to(tl.int32), 1)
                tl.store(chosen_ptr[:, None] + slot, offs_n + tl.zeros_like(slot), mask=valid_m[:, None] & shown)
                is_empty = (offs_k >= tl.sum(shown.to(tl.int32), 1)[:, None]) & (offs_k < TOP_K - 1)
                nothing = tl.full([BLOCK_M, BLOCK_K], -1, tl.int32)
                tl.store(chosen_ptr[:, None] + 1 + offs_k, nothing, mask=valid_m[:, None] & is_empty)
            else:
                enter = tl.sum((scores > tl.min(best, 1)[:, None]).to(tl.int32), 1)
                for _ in range(tl.minimum(tl.max(enter), TOP_K - 1)):
                    top, place = tl.max(scores, 1, return_indices=True)
                    lowest = tl.min(best, 1)
                    last = tl.max(tl.where(best == lowest[:, None], number, -1), 1)
                    replaced = (number == last[:, None]) & (top > lowest)[:, None]
                    best = tl.where(replaced, top[:, None], best)
                    number = tl.where(replaced, (start + place)[:, None], number)
                    scores = tl.where(offs_n == place[:, None], float("-inf"), scores)
        if not ONE_TILE:
            number = tl.where(best > float("-inf"), number, -1)
            tl.store(chosen_ptr[:, None] + 1 + offs_k, number, mask=valid_m[:, None] & (offs_k < TOP_K - 1))
