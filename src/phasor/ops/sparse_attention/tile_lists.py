"""Lists of key blocks: which tiles of queries attend to which blocks of keys, and back, as tables that kernels read.

A tile is some queries, not necessarily neighbors, that attend to the same blocks. A query may be in several tiles, each
of which is one of its slots. Blocks that every query of a tile sees whole are unmasked; the others come last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from phasor.ops.launch import cdiv
from phasor.ops.sparse_attention.patterns import KeyBlocks

ROWS_AT_A_TIME = 1024  # blocks of queries whose lists are made at a time
NO_PAIR = -1


@dataclass(frozen=True)
class TileLists:
    """The tables, int32, each with one row for all heads or one for every row of the batch and head.

    `pairs` `[rows, tiles, BLOCK_M]` are queries times the number of slots plus the slot, -1 for none. `spans`
    `[rows, tiles, 3]` say where in `entries` a tile's unmasked blocks begin, where its masked ones begin, and where
    they end. `tile_spans` and `tile_entries` are the same the other way: the tiles of every block.
    """

    pairs: Tensor
    spans: Tensor
    entries: Tensor
    tile_spans: Tensor
    tile_entries: Tensor


def largest_tile(block: int, most: int) -> int:
    """The largest power of two that divides a block, at most `most`.

    >>> largest_tile(192, 128), largest_tile(4, 128)
    (64, 4)
    """
    return min(block & -block, most)


@functools.lru_cache(maxsize=8)
def key_block_lists(
    pattern: KeyBlocks, queries: int, keys: int, offset: int, causal: bool, block_m: int, device: torch.device
) -> TileLists:
    """The lists of a pattern of blocks, for queries that come after `offset` others; made once for a shape.

    >>> lists = key_block_lists(KeyBlocks(2, 1, 2), 6, 6, 0, True, 2, torch.device("cpu"))
    >>> lists.pairs[0].tolist(), lists.spans[0].tolist(), lists.entries[0].tolist()
    ([[0, 1], [2, 3], [4, 5]], [[0, 0, 1], [1, 1, 2], [2, 3, 4]], [0, 1, 0, 2])
    """
    block, first = pattern.block, offset // pattern.block
    count, num_blocks = cdiv(offset + queries, block) - first, cdiv(keys, block)
    number = torch.arange(num_blocks, device=device)
    found = []
    for start in range(first, first + count, ROWS_AT_A_TIME):
        own = torch.arange(start, min(start + ROWS_AT_A_TIME, first + count), device=device)[:, None]
        shown = pattern.visible_blocks(own, number)
        shown = shown & (number <= own) if causal else shown
        found.append(shown.nonzero() + torch.tensor([start - first, 0], device=device))
    own, seen = torch.cat(found).unbind(1)
    masked = (seen == own + first) & causal | ((seen + 1) * block > keys)
    spans = list_spans(own, masked, count)
    tiles_per_block = block // block_m
    by_block = torch.argsort(seen * 2 + masked, stable=True)
    back = (own[by_block, None] * tiles_per_block + torch.arange(tiles_per_block, device=device)).flatten()
    back_spans = list_spans(seen[by_block], masked[by_block], num_blocks) * tiles_per_block
    index = first * block - offset + torch.arange(count * block, device=device)
    pairs = torch.where((index >= 0) & (index < queries), index, NO_PAIR).view(-1, block_m)
    tables = (pairs, spans.repeat_interleave(tiles_per_block, 0), seen, back_spans, back)
    return TileLists(*(x.to(torch.int32)[None].contiguous() for x in tables))


def list_spans(owner: Tensor, masked: Tensor, count: int) -> Tensor:
    """Where the entries of each of `count` owners begin, where their masked ones do, and where they end.

    Entries are given by their owners, in rising order, the masked ones last.
    """
    total = torch.bincount(owner, minlength=count)
    ends = total.cumsum(0)
    hidden = torch.bincount(owner[masked], minlength=count)
    return torch.stack((ends - total, ends - hidden, ends), dim=1)


def selected_block_lists(chosen: Tensor, num_blocks: int, block_m: int) -> TileLists:
    """The lists of blocks that each query and head chose, `[B, H, Tq, top_k]`: its own first, -1 for none.

    All queries that chose a block are gathered into tiles. Nothing waits for the device.

    >>> chosen = torch.tensor([[0, -1], [0, -1], [1, 0]])[None, None]
    >>> lists = selected_block_lists(chosen, 2, 2)
    >>> lists.pairs[0].tolist()
    [[5, -1], [0, 2], [4, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]
    >>> lists.entries[0, :3].tolist(), lists.tile_spans[0].tolist()
    ([0, 0, 1], [[0, 1, 2], [2, 2, 3]])
    """
    groups = 2 * num_blocks  # the queries that see a block whole, and those whose own block it is
    group = torch.where(chosen < 0, groups, chosen * 2)
    group[..., 0] += 1
    group = group.flatten(0, 1).flatten(1).to(torch.int16 if groups < 1 << 15 else torch.int32)
    rows, num_pairs = group.shape
    in_order, pairs = group.sort(dim=1, stable=True)
    number = torch.arange(groups + 1, dtype=group.dtype, device=group.device).expand(rows, -1).contiguous()
    begins = torch.searchsorted(in_order, number)  # of every group, and of the pairs that chose none
    tiles = (begins.diff(dim=1) + block_m - 1) // block_m
    ends = tiles.cumsum(1)
    most = cdiv(num_pairs, block_m) + groups
    tile = torch.arange(most, device=group.device).expand(rows, -1).contiguous()
    group_of = torch.searchsorted(ends, tile, right=True)
    used = group_of < groups
    group_of = group_of.clamp(max=groups - 1)
    place = (tile - (ends - tiles).gather(1, group_of)) * block_m + begins.gather(1, group_of)
    places = place[:, :, None] + torch.arange(block_m, device=group.device)
    inside = (places < begins.gather(1, group_of + 1)[:, :, None]) & used[:, :, None]
    taken = pairs.gather(1, places.clamp(max=num_pairs - 1).flatten(1)).view_as(places)
    masked = group_of % 2 == 1
    spans = torch.stack((tile, torch.where(masked & used, tile, tile + used), tile + used), dim=-1)
    starts = torch.nn.functional.pad(ends, (1, 0))
    block_spans = torch.stack((starts[:, 0:-1:2], starts[:, 1::2], starts[:, 2::2]), dim=-1)
    tables = (torch.where(inside, taken, NO_PAIR), spans, group_of // 2, block_spans, tile[:1])
    return TileLists(*(x.to(torch.int32).contiguous() for x in tables))
