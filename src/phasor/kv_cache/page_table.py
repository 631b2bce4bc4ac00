"""Page tables: which page has each block of each row's tokens, for the layers that keep the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phasor.config import AttentionConfig
from phasor.kv_cache.pages import NULL_PAGE, PagePool
from phasor.kv_cache.slots import EMPTY

FIRST_WIDTH = 64  # blocks that a table has room for at first, where rows keep all of their tokens


@dataclass(frozen=True)
class PageLayout:
    """Which tokens layers keep: all, those of a window and the sinks before it, or none beside a state."""

    window: int | None = None
    sinks: int = 0
    state: bool = False

    @classmethod
    def of(cls, attention: AttentionConfig) -> PageLayout:
        """That of the layers with some attention."""
        if attention.keeps_state:
            return cls(state=True)
        return cls() if attention.reach is None else cls(attention.reach, attention.sink_tokens)


class Keys(NamedTuple):
    """What the rows of a call attend to: pages `[B, n]`, and which token is in each slot, `[B, n * page_size]`.

    Tokens are given by their index, which is EMPTY where there is none; None where slots are in the order of tokens.
    """

    pages: Tensor
    tokens: Tensor | None


class PageTable:
    """The pages of rows. A block is `page_size` tokens of a row, counted from its first.

    Rows with a window keep the blocks of their sinks and those that the window still reaches; `most_new` is the most
    tokens of one call.

    >>> table = PageTable(PageLayout(window=4), rows=1, pages=9, page_size=2, most_new=3)
    >>> table.reserve(0, 0, 3), table.reserve(0, 3, 9), table.pool.held
    ([], [], 5)
    >>> table.release_behind(0, 9)
    >>> table.pool.held
    2
    """

    def __init__(self, layout: PageLayout, rows: int, pages: int, page_size: int, most_new: int) -> None:
        self.layout, self.page_size, self.pool = layout, page_size, PagePool(pages)
        self.sink_blocks = -(-layout.sinks // page_size)
        self.ring: int | None = None
        if layout.window is not None:
            self.ring = (layout.window + most_new - 2) // page_size + 2
        width = FIRST_WIDTH if self.ring is None else self.sink_blocks + self.ring
        self.entries = np.full((rows, width), NULL_PAGE)
        self.first = np.full(rows, self.sink_blocks)  # the first block after the sinks that is kept
        self.end = np.zeros(rows, dtype=np.int64)  # the block after the last one

    @property
    def most_blocks(self) -> int | None:
        """The most blocks that a row holds at once; None where it keeps all of its tokens."""
        return None if self.ring is None else self.sink_blocks + self.ring

    def place(self, block: np.ndarray | int) -> np.ndarray | int:
        """Where blocks stand in the table."""
        if self.ring is None:
            return block
        return np.where(block < self.sink_blocks, block, self.sink_blocks + (block - self.sink_blocks) % self.ring)

    def page(self, row: int, block: int) -> int:
        """The page of a block that a row holds."""
        return int(self.entries[row, self.place(block)])

    def blocks(self, row: int) -> list[int]:
        """The blocks that a row holds."""
        end = int(self.end[row])
        return [*range(min(self.sink_blocks, end)), *range(int(self.first[row]), end)]

    def pages_to_take(self, row: int, start: int, stop: int) -> int:
        """How many pages have to be taken before a row's tokens from `start` to `stop` are written."""
        return max(0, -(-stop // self.page_size) - int(self.end[row])) + self._copies_first(row, start)

    def _copies_first(self, row: int, start: int) -> bool:
        """Whether the first new token goes into a page that other rows hold too."""
        block = start // self.page_size
        return block < self.end[row] and self.pool.is_shared(self.page(row, block))

    def reserve(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Take the pages for a row's tokens from `start` to `stop`.

        The result has the pages to copy before they are written, each with the page it becomes.
        """
        copies = []
        if self._copies_first(row, start):
            block = start // self.page_size
            old, new = self.page(row, block), self.pool.take()
            self.pool.release(old)
            self.entries[row, self.place(block)] = new
            copies.append((old, new))
        for block in range(int(self.end[row]), -(-stop // self.page_size)):
            self.append(row, block, self.pool.take())
        return copies

    def append(self, row: int, block: int, page: int) -> None:
        """Give a row the page of a block, the one after its last."""
        if self.ring is None and block >= self.entries.shape[1]:
            wider = np.full((len(self.entries), 2 * block), NULL_PAGE)
            wider[:, : self.entries.shape[1]] = self.entries
            self.entries = wider
        self.entries[row, self.place(block)] = page
        self.end[row] = block + 1

    def first_in_reach(self, count: int) -> int:
        """The first block after the sinks that the token after `count` others sees, or its successors."""
        if self.layout.window is None:
            return 0
        return max(self.sink_blocks, (count - self.layout.window + 1) // self.page_size)

    def release_behind(self, row: int, count: int) -> None:
        """Release the pages that no token sees after `count` of a row."""
        while self.first[row] < min(self.first_in_reach(count), int(self.end[row])):
            place = self.place(int(self.first[row]))
            self.pool.release(int(self.entries[row, place]))
            self.entries[row, place] = NULL_PAGE
            self.first[row] += 1

    def skip(self, row: int, blocks: int) -> None:
        """Begin a row after that many blocks, of which it holds none but those it is given."""
        self.first[row], self.end[row] = max(self.sink_blocks, blocks), blocks

    def release(self, row: int) -> list[int]:
        """Release all pages of a row; the result has those that nobody holds or may find again."""
        pages = [self.page(row, block) for block in self.blocks(row)]
        for page in reversed(pages):  # so that the end of a prefix is taken first, without which its beginning is found
            self.pool.release(page)
        self.entries[row], self.first[row], self.end[row] = NULL_PAGE, self.sink_blocks, 0
        return [page for page in pages if not self.pool.references[page] and page not in self.pool.keys]

    def share(self, row: int, other: int) -> None:
        """Let another row, which has none, hold the pages of a row."""
        for block in self.blocks(row):
            self.pool.hold(self.page(row, block))
        for of_rows in (self.entries, self.first, self.end):
            of_rows[other] = of_rows[row]

    def keys(
        self, rows: np.ndarray, before: np.ndarray, after: np.ndarray, device: torch.device, *, round_up: bool = False
    ) -> Keys:
        """What rows attend to whose tokens from `before` to `after` are new; `round_up` takes one of few sizes."""
        if self.layout.window is None:
            low = np.zeros_like(before)
        else:
            low = np.maximum(self.sink_blocks, (before - self.layout.window + 1) // self.page_size)
        high = -(-after // self.page_size)
        count = max(1, int((high - low).max()))
        if round_up:
            count = 1 << (count - 1).bit_length()
        blocks = low[:, None] + np.arange(count)
        sinks = np.broadcast_to(np.arange(self.sink_blocks), (len(rows), self.sink_blocks))
        blocks = np.concatenate((sinks, blocks), axis=1)
        held = blocks < high[:, None]
        pages = np.where(held, self.entries[rows[:, None], self.place(np.where(held, blocks, 0))], NULL_PAGE)
        if self.layout.window is None:
            return Keys(to_device(pages, device), None)
        first = to_device(np.where(held, blocks, EMPTY // self.page_size), device) * self.page_size  # [B, n]
        index = (first[:, :, None] + torch.arange(self.page_size, device=device)).flatten(1)
        return Keys(to_device(pages, device), index.masked_fill(index >= to_device(after, device)[:, None], EMPTY))

    def size(self, before: int) -> int:
        """How many pages `keys` takes where it rounds up, for one row and a token after `before` others."""
        low = self.first_in_reach(before)
        return 1 << (max(1, before // self.page_size + 1 - low) - 1).bit_length()

    def slots(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Where rows keep tokens, `[B, T]` by their index: slots of all pages, one page after the other."""
        block = tokens // self.page_size
        return self.entries[rows[:, None], self.place(block)] * self.page_size + tokens % self.page_size


def to_device(x: np.ndarray, device: torch.device, dtype: type[np.signedinteger[Any]] = np.int64) -> Tensor:
    """Integers of the host as a tensor. On a GPU the host goes on before they are there."""
    host = torch.from_numpy(np.ascontiguousarray(x, dtype=dtype))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
