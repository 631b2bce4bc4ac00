"""The patterns of sparse attention, as rules over the indices of tokens in their sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dilated:
    """Every `dilation`-th key of the query's own segment, counted from the query.

    >>> import torch
    >>> Dilated(dilation=2, segment=4).visible(torch.tensor([[5], [6]]), torch.arange(8)).int().tolist()
    [[0, 0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0, 1, 0]]
    """

    dilation: int = 1
    segment: int | None = None

    @property
    def query_block(self) -> int | None:
        return None

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        near = (queries - keys) % self.dilation == 0
        return near if self.segment is None else near & (queries // self.segment == keys // self.segment)

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        if self.segment is None:
            return [(0, keys)]
        first, last = start // self.segment, (stop - 1) // self.segment
        return [(first * self.segment, min((last + 1) * self.segment, keys))]


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys: those fewer than `local` blocks away, multiples of `stride` blocks away, and the first ones.

    Queries of the first `global_blocks` blocks see all keys.

    >>> import torch
    >>> index = torch.arange(6)
    >>> KeyBlocks(block=1, local=1, stride=3, global_blocks=1).visible(index[3:, None], index).int().tolist()
    [[1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1]]
    """

    block: int
    local: int = 1
    stride: int | None = None
    global_blocks: int = 0

    @property
    def query_block(self) -> int | None:
        return self.block

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.visible_blocks(queries // self.block, keys // self.block)

    def visible_blocks(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where the queries of a block attend to the keys of a block, both given by the number of the block."""
        shown = (queries - keys).abs() < self.local
        if self.stride is not None:
            shown = shown | ((queries - keys) % self.stride == 0)
        if self.global_blocks:
            shown = shown | (queries < self.global_blocks) | (keys < self.global_blocks)
        return shown

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        first, last, blocks = start // self.block, (stop - 1) // self.block, -(-keys // self.block)
        if first < self.global_blocks or (self.stride is not None and last - first + 1 >= self.stride):
            return [(0, keys)]
        shown = set(range(min(self.global_blocks, blocks)))
        shown.update(range(max(0, first - self.local + 1), min(last + self.local, blocks)))
        if self.stride is not None:
            for query in range(first, last + 1):
                shown.update(range(query % self.stride, blocks, self.stride))
        ranges: list[tuple[int, int]] = []
        for block in sorted(shown):
            begin, end = block * self.block, min((block + 1) * self.block, keys)
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((begin, end))
        return ranges


@dataclass(frozen=True)
class TopBlocks:
    """The query's own block of keys, and the earlier ones of highest score: `top_k` blocks in all."""

    block: int
    top_k: int

    @property
    def query_block(self) -> int | None:
        return None

    def visible(self, queries: Tensor, keys: Tensor) -> None:
        """Not by index: `selection.py` chooses blocks by their scores."""

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        return [(0, keys)]
