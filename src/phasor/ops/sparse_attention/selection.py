"""Which blocks of keys have the highest scores with a query: a block's score is that of its mean key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phasor.ops.attention.mask import Mask
from phasor.ops.sparse_attention.patterns import TopBlocks
from phasor.ops.topk import stable_topk


class BlockIndex(NamedTuple):
    """The blocks of each row of keys, numbered as they come: `most` of them, or fewer.

    For each key its block, `[B or 1, Tk]`; for each query its own block, and the first one of its document,
    `[B or 1, Tq]`.
    """

    of_keys: Tensor
    own: Tensor
    first: Tensor
    most: int


def block_index(mask: Mask, block: int, queries: int, keys: int, like: Tensor) -> BlockIndex:
    """The blocks of all keys and queries. Padding does not count, and every document begins a new block.

    >>> mask = Mask(causal=True, order=torch.tensor([[0, 1, 2, 0, 1]]), key_mask=torch.ones(1, 5, dtype=torch.bool))
    >>> of_keys, own, first, _ = block_index(mask, 2, 5, 5, torch.zeros(1))
    >>> of_keys.tolist(), first.tolist()
    ([[0, 0, 1, 2, 2]], [[0, 0, 0, 2, 2]])
    """
    every_query, every_key = torch.arange(queries, device=like.device), torch.arange(keys, device=like.device)
    q_index, k_index = mask.token_indices(every_query, every_key)
    if mask.order is None:
        own = q_index // block
        return BlockIndex(k_index // block, own, torch.zeros_like(own), -(-keys // block))
    starts = k_index % block == 0
    starts = starts if mask.key_mask is None else starts & mask.key_mask
    of_keys = (starts.cumsum(1) - 1).clamp(min=0)
    own = mask.at_queries(of_keys, every_query)
    return BlockIndex(of_keys, own, (own - q_index // block).clamp(min=0), keys)


def mean_keys(k: Tensor, block: int) -> Tensor:
    """The mean key of every block, `[B, blocks, K, D]` in at least float32; meaningless for one that is not full.

    >>> mean_keys(torch.arange(4.0)[None, :, None, None], 2).flatten().tolist()
    [0.5, 2.5]
    """
    block = min(block, k.shape[1])
    padding = -k.shape[1] % block
    k = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, padding)) if padding else k
    return k.unflatten(1, (-1, block)).mean(2, dtype=torch.promote_types(k.dtype, torch.float32))


def packed_mean_keys(k: Tensor, mask: Mask, blocks: BlockIndex, block: int) -> Tensor:
    """The same where blocks begin at any token, and padding is in none."""
    k = k if k.dtype == torch.float64 else k.float()
    k = k if mask.key_mask is None else k * mask.key_mask[:, :, None, None]
    sums = k.new_zeros(k.shape[0], blocks.most, *k.shape[2:])
    return sums.scatter_add(1, blocks.of_keys[:, :, None, None].expand_as(k), k) / block


def select_blocks(q: Tensor, means: Tensor, own: Tensor, first: Tensor, top_k: int) -> Tensor:
    """The blocks that queries `[B, Tq, H, D]` attend to, `[B, H, Tq, top_k]`: their own, then those of highest score.

    Blocks between the first of a query's document and its own are chosen by score; -1 where there are no more. Of equal
    scores the lower block is chosen, however many blocks come later. Sums are in float64 and compared in float32, so
    that equal ones stay equal in any order in which a matrix product adds.

    >>> means = torch.tensor([1.0, 3.0, 3.0, 2.0, 9.0])[None, :, None, None]
    >>> own = torch.tensor([[0, 3, 4]])
    >>> select_blocks(torch.ones(1, 3, 1, 1), means, own, own * 0, 2).tolist()
    [[[[0, -1], [3, 1], [4, 1]]]]
    """
    q = q.unflatten(2, (means.shape[2], -1))
    scores = torch.einsum("btkgd,bnkd->bkgtn", q.double(), means.double()).float().flatten(1, 2)
    number = torch.arange(means.shape[1], device=q.device)
    own, first = own[:, None, :, None], first[:, None, :, None]
    scores = scores.masked_fill((number < first) | (number > own), float("-inf"))
    values, chosen = stable_topk(scores.masked_fill(number == own, float("inf")), min(top_k, len(number)))
    chosen = torch.where(values > float("-inf"), chosen, -1)
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=-1)


@torch.no_grad()
def selected_keys(q: Tensor, k: Tensor, mask: Mask, pattern: TopBlocks, start: int, stop: int) -> Tensor:
    """True where the queries `start` to `stop` attend to a key's block, `[B, H, stop - start, Tk]`."""
    blocks = block_index(mask, pattern.block, q.shape[1], k.shape[1], q)
    k = k.detach()
    size = pattern.block
    means = mean_keys(k, size) if mask.order is None else packed_mean_keys(k, mask, blocks, size)
    own, first = blocks.own[:, start:stop], blocks.first[:, start:stop]
    chosen = select_blocks(q[:, start:stop].detach(), means, own, first, min(pattern.top_k, blocks.most))
    shown = torch.zeros(*chosen.shape[:3], blocks.most + 1, dtype=torch.bool, device=q.device)
    shown.scatter_(-1, torch.where(chosen < 0, blocks.most, chosen), True)
    index = blocks.of_keys.clamp(max=blocks.most)[:, None, None, :]
    return shown.gather(-1, index.expand(*chosen.shape[:3], -1))
