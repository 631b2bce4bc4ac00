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

    `pairs` `[rows, pairs]` are queries times the number of slots plus the slot, -1 for none, tile after tile. `spans`
    `[rows, tiles, 5]` say where in `pairs` a tile begins and ends, where in `entries` its unmasked blocks begin, where
    its masked ones begin, and where they end. `block_spans` `[rows, blocks, 3]` are such bounds of what sees a block:
    of its tiles in `block_entries`, or where that is None, of its `pairs` themselves.
    """

    pairs: Tensor
    spans: Tensor
    entries: Tensor
    block_spans: Tensor
    block_entries: Tensor | None = None


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
    ([0, 1, 2, 3, 4, 5], [[0, 2, 0, 0, 1], [2, 4, 1, 1, 2], [4, 6, 2, 3, 4]], [0, 1, 0, 2])
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
    pairs = torch.where((index >= 0) & (index < queries), index, NO_PAIR)
    begins = torch.arange(0, len(pairs), block_m, device=device)[:, None]
    spans = torch.cat((begins, begins + block_m, spans.repeat_interleave(tiles_per_block, 0)), dim=1)
    tables = (pairs, spans, seen, back_spans, back)
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
    >>> lists.pairs[0, :4].tolist(), lists.spans[0, :3, :2].tolist(), lists.entries[0, :3].tolist()
    ([1, 3, 5, 0], [[2, 3], [3, 5], [5, 6]], [0, 0, 1])
    >>> lists.block_spans[0].tolist()
    [[2, 3, 5], [5, 5, 6]]
    """
    groups = 2 * num_blocks  # the queries that see a block whole, and those whose own block it is
    rows, num_pairs = chosen.shape[0] * chosen.shape[1], chosen[0, 0].numel()
    keys = rows * (groups + 2)  # before its groups, a row has the pairs that chose none
    first = torch.arange(2, keys, groups + 2, device=chosen.device)[:, None, None]
    # All rows are one sort: torch sorts a few long rows one after the other.
    dtype = torch.int16 if keys <= 1 << 15 else torch.int32
    group = torch.empty(rows, *chosen.shape[2:], dtype=dtype, device=chosen.device)
    torch.add(first.to(chosen.dtype), chosen.flatten(0, 1), alpha=2, out=group)
    group[..., 0] += 1
    in_order, order = group.flatten().sort(stable=True)
    pairs = torch.empty_like(order, dtype=torch.int32)
    torch.remainder(order, num_pairs, out=pairs)
    number = torch.arange(keys, dtype=group.dtype, device=group.device)
    begins = torch.searchsorted(in_order, number).view(rows, -1)[:, 2:]  # of every group
    begins = begins - num_pairs * torch.arange(rows, device=group.device)[:, None]
    begins = torch.nn.functional.pad(begins, (0, 1), value=num_pairs)
    tiles = (begins.diff(dim=1) + block_m - 1) // block_m
    ends = tiles.cumsum(1)
    most = cdiv(num_pairs, block_m) + groups
    tile = torch.arange(most, device=group.device).expand(rows, -1).contiguous()
    group_of = torch.searchsorted(ends, tile, right=True)
    used = group_of < groups
    group_of = group_of.clamp(max=groups - 1)
    begin = (tile - (ends - tiles).gather(1, group_of)) * block_m + begins.gather(1, group_of)
    end = torch.minimum(begin + block_m, begins.gather(1, group_of + 1))
    own = group_of % 2 == 1
    spans = torch.stack((begin, end, tile, torch.where(own & used, tile, tile + used), tile + used), dim=-1)
    block_spans = torch.stack((begins[:, 0:-1:2], begins[:, 1::2], begins[:, 2::2]), dim=-1)
    tables = (pairs.view(rows, -1), spans, group_of // 2, block_spans)
    return TileLists(*(x.to(torch.int32).contiguous() for x in tables))
