"""The paged key/value cache: rows that come and go, whose tokens are in pages of one pool.

Layers that keep the same tokens share a `PageTable`, which says where each row has its tokens. Rows whose texts begin
alike share pages, which a row copies before it writes into one. What layers keep of each row, such as a state, and what
cross-attention computes from its source, has a slot for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.cached import CachedTensor
from phasor.config.schema import check_integer
from phasor.kv_cache.page_table import PageLayout, PageTable
from phasor.kv_cache.paged_call import PagedCall
from phasor.kv_cache.pages import prefix_key
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.states import clear_rows, stored_dtype


@dataclass
class PagedRow:
    """One row: its number, the tokens it holds, the length planned for, and how far its pages are known by prefix.

    `salt` is what its keys and values depend on beside the tokens.
    """

    number: int
    length: int | None = None
    salt: bytes = b""
    count: int = 0
    keys: list[bytes] = field(default_factory=list)  # of its full blocks; of rows with a window the last one alone
    num_keys: int = 0
    source_length: int = 0
    reserved: int = 0  # tokens up to which it has pages that no other row holds


class PagedKVCache:
    """Keys and values of up to `max_rows` sequences in `pages` pages of `page_size` tokens.

    A row is begun by `new_row`, given pages by `reserve`, and read by `model(tokens, cache=cache.call(rows))`. Where
    `reserve` would find too few pages, `room_for` says so before.

    >>> from phasor import Transformer, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> cache = PagedKVCache(model.config, max_rows=4, pages=9, page_size=4)
    >>> tokens, row, other = torch.randint(0, 50, (1, 9)), cache.new_row(), cache.new_row()
    >>> with torch.no_grad():
    ...     cache.reserve(row, 5)
    ...     first = model(tokens[:, :5], cache=cache.call([row]))
    ...     for each, new in ((row, 4), (other, 4)):
    ...         cache.reserve(each, new)
    ...     both = model(tokens[:, 5:].expand(2, -1), cache=cache.call([row, other]))
    ...     torch.allclose(torch.cat((first, both[:1]), dim=1), model(tokens), atol=1e-5)
    True
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        pages: int,
        page_size: int = 16,
        most_new: int = 512,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"max_rows": (max_rows, 1), "pages": (pages, 2), "page_size": (page_size, 1), "most_new": (most_new, 1)}
        for name, (value, least) in sizes.items():
            check_integer(f"a paged cache's {name}", value, least, 1 << 31)
        self.config, self.max_rows, self.page_size = config, max_rows, page_size
        self.device = torch.device("cpu" if device is None else device)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        layers = [config.layer(index).attention for index in range(config.num_layers)]
        self.layouts = [PageLayout.of(attention) for attention in layers]
        self.tables = {
            layout: self._new_table(layout, pages, most_new)
            for layout in dict.fromkeys(self.layouts)
            if not layout.state
        }
        self.layers = [
            {} if layout.state else self._zeros(config.cached_per_token(i), self.tables[layout].pool.count, page_size)
            for i, layout in enumerate(self.layouts)
        ]
        # One more than there are rows: the last is that of rows that only fill a call up.
        self.states = [self._zeros(config.cached_per_sequence(i), max_rows + 1) for i in range(config.num_layers)]
        self.cross: list[dict[str, Tensor]] = []
        self.free = list(range(max_rows - 1, -1, -1))

    def _new_table(self, layout: PageLayout, pages: int, most_new: int) -> PageTable:
        table = PageTable(layout, self.max_rows + 1, pages, self.page_size, most_new)
        if table.most_blocks is None or self.max_rows * table.most_blocks >= pages:
            return table
        # Rows with a window need no more; as many again keep the windows of prefixes.
        fewer = min(pages, 2 * self.max_rows * table.most_blocks + 1)
        return PageTable(layout, self.max_rows + 1, fewer, self.page_size, most_new)

    def _zeros(self, declared: dict[str, CachedTensor], *sizes: int) -> dict[str, Tensor]:
        return {
            name: torch.zeros((*sizes, *kept.shape), device=self.device, dtype=stored_dtype(kept, self.dtype))
            for name, kept in declared.items()
        }

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a state, which has no pages."""
        return any(self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of what layers keep."""
        return sum(x.nbytes for tensors in (*self.layers, *self.states, *self.cross) for x in tensors.values())

    def new_row(self, *, length: int | None = None, salt: bytes = b"") -> PagedRow:
        """An empty row, planned for a length where frequencies depend on it; there has to be a free one."""
        row = PagedRow(self.free.pop(), length, salt)
        clear_rows(self.states, slice(row.number, row.number + 1))  # no tensor: a copy would wait for the device
        return row

    def fits(self, tokens: int | None) -> bool:
        """Whether one row alone could hold that many tokens; None stands for any number of them."""
        for table in self.tables.values():
            blocks = table.most_blocks
            if tokens is not None:
                blocks = min(-(-tokens // self.page_size), blocks or tokens)
            if blocks is None or blocks > table.pool.count - 1:
                return False
        return True

    def room_for(self, row: PagedRow, new: int, spare: int = 0) -> bool:
        """Whether there are pages for the next tokens of a row, and some to spare."""
        if row.count + new <= row.reserved and not spare:
            return True
        needed = {table: table.pages_to_take(row.number, row.count, row.count + new) for table in self.tables.values()}
        return all(
            min(count, table.most_blocks or count) + spare <= table.pool.available for table, count in needed.items()
        )

    def room_for_new(self, tokens: int, spare: int) -> bool:
        """Whether there are pages for the tokens of a new row, and some to spare."""
        blocks = -(-tokens // self.page_size)
        return all(min(blocks, t.most_blocks or blocks) + spare <= t.pool.available for t in self.tables.values())

    def sizes(self, row: PagedRow) -> list[int]:
        """What decides how much the next token of a row computes, where it is rounded up."""
        return [*(table.size(row.count) for table in self.tables.values()), round_up(row.source_length)]

    def reserve(self, row: PagedRow, new: int) -> None:
        """Take the pages that the next tokens of a row need."""
        if row.count + new <= row.reserved:
            return
        row.reserved = -(-(row.count + new) // self.page_size) * self.page_size
        for layout, table in self.tables.items():
            for old, own in table.reserve(row.number, row.count, row.count + new):
                for x in self._pools(layout):
                    x[own] = x[old]

    def _pools(self, layout: PageLayout) -> list[Tensor]:
        return [
            x for own, tensors in zip(self.layouts, self.layers, strict=True) if own == layout for x in tensors.values()
        ]

    def call(
        self,
        rows: Sequence[PagedRow],
        new: Sequence[int] | None = None,
        *,
        fill: int = 0,
        round_up: bool = False,
        config: ModelConfig | None = None,
    ) -> PagedCall:
        """The cache as a forward takes it, for the next tokens of some rows and `fill` more that are not kept.

        `new` says how many tokens each row reads, those of shorter ones padded on the left; without it the attention
        mask is read, for which the host waits.
        With those, and with numbers of keys that `round_up` makes powers of two, all that is computed is of few sizes.
        `config` is that of a model whose positions differ from those of the cache's.
        """
        return PagedCall(self, rows, new, fill, round_up, self.config if config is None else config)

    def remember(self, row: PagedRow, tokens: Sequence[int], stop: int | None = None) -> None:
        """Let other rows find the full pages of a row, whose tokens so far these are; those up to `stop`."""
        full = min(row.count, row.count if stop is None else stop) // self.page_size
        for block in range(row.num_keys, full):
            before = row.keys[-1] if row.keys else row.salt
            key = prefix_key(before, tokens[block * self.page_size : (block + 1) * self.page_size])
            row.keys.append(key)
            row.num_keys += 1
            for table in self.tables.values():
                if block < table.sink_blocks or table.first[row.number] <= block:
                    table.pool.remember(table.page(row.number, block), key)
        del row.keys[:-1]

    def find_prefix(self, row: PagedRow, tokens: Sequence[int], multiple: int = 1) -> int:
        """Give an empty row the pages of the longest prefix of its tokens; how many tokens that are.

        The last token is left to be read. The number of tokens is a multiple of one given.
        """
        keys: list[bytes] = []
        for block in range((len(tokens) - 1) // self.page_size):
            own = tokens[block * self.page_size : (block + 1) * self.page_size]
            key = prefix_key(keys[-1] if keys else row.salt, own)
            if any(table.ring is None and table.pool.find(key) is None for table in self.tables.values()):
                break
            keys.append(key)
        for blocks in range(len(keys), 0, -1):
            found = None if blocks * self.page_size % multiple else self._pages_of_prefix(keys, blocks)
            if found is not None:
                self._begin_with(row, keys[:blocks], found)
                return row.count
        return 0

    def _pages_of_prefix(self, keys: list[bytes], count: int) -> list[dict[int, int]] | None:
        """The pages by block, in each table, that a row needs which has read that many; None where one is missing."""
        found = []
        for table in self.tables.values():
            first = table.first_in_reach(count * self.page_size)
            pages: dict[int, int] = {}
            for block in (*range(count - 1, first - 1, -1), *range(min(table.sink_blocks, count))):
                page = table.pool.find(keys[block])
                if page is None:
                    return None
                pages[block] = page
            found.append(dict(sorted(pages.items())))
        return found

    def _begin_with(self, row: PagedRow, keys: list[bytes], found: list[dict[int, int]]) -> None:
        row.count, row.keys, row.num_keys = len(keys) * self.page_size, keys[-1:], len(keys)
        for table, pages in zip(self.tables.values(), found, strict=True):
            first = table.first_in_reach(row.count)
            for block, page in pages.items():
                if block >= table.sink_blocks:
                    break
                table.pool.hold(page)
                table.append(row.number, block, page)
            if first < len(keys):
                table.skip(row.number, first)
            for block in range(first, len(keys)):
                table.pool.hold(pages[block])
                table.append(row.number, block, pages[block])

    def fork(self, row: PagedRow) -> PagedRow:
        """Another row that holds what a row does; there has to be a free one."""
        other = self.new_row(length=row.length, salt=row.salt)
        for table in self.tables.values():
            table.share(row.number, other.number)
        for tensors in (*self.states, *self.cross):
            for x in tensors.values():
                x[other.number] = x[row.number]
        other.count, other.keys, other.num_keys = row.count, list(row.keys), row.num_keys
        other.source_length, row.reserved = row.source_length, 0
        return other

    def release(self, row: PagedRow, *, clear: bool = False) -> None:
        """End a row; `clear` overwrites what only it held, where that may be no numbers, which spoil others."""
        for layout, table in self.tables.items():
            if clear:
                for block in table.blocks(row.number):
                    if not table.pool.is_shared(table.page(row.number, block)):
                        table.pool.forget(table.page(row.number, block))
            pages = table.release(row.number)
            if clear and pages:
                for x in self._pools(layout):
                    x[pages] = 0
        if clear:
            for tensors in (*self.states, *self.cross):
                for x in tensors.values():
                    x[row.number] = 0
        self.free.append(row.number)

    def commit(self, rows: Sequence[PagedRow], new: Sequence[int]) -> None:
        """Count the tokens that rows have read, and release pages that their windows have left."""
        windows = [table for table in self.tables.values() if table.layout.window is not None]
        for row, count in zip(rows, new, strict=True):
            row.count += count
            for table in windows:
                table.release_behind(row.number, row.count)

    def keep_source(self, rows: Sequence[PagedRow], memory: EncoderOutput, cross: list[dict[str, Tensor]]) -> None:
        """Keep what cross-attention computed from the sources of rows."""
        length = memory.hidden.shape[1]
        held = next((x.shape[1] for x in self.cross[0].values()), 0) if self.cross else 0
        if length > held:
            self._widen_cross(round_up(length))
        real = memory.attention_mask
        sizes = [length] * len(rows) if real is None else real.sum(1).tolist()
        for i, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            row.source_length = size
            for own, given in zip(self.cross, cross, strict=True):
                for name, x in given.items():
                    own[name][row.number, :size] = x[i, :size].to(own[name].dtype)

    def _widen_cross(self, length: int) -> None:
        layers = [self.config.layer(index).attention for index in range(self.config.num_layers)]
        wider = [self._zeros(each.cached_per_token(self.config), self.max_rows + 1, length) for each in layers]
        for new, old in zip(wider, self.cross, strict=False):
            for name, x in old.items():
                new[name][:, : x.shape[1]] = x
        self.cross = wider

    def numbers(self, rows: Sequence[PagedRow], fill: int) -> np.ndarray:
        """The numbers of rows, and those of rows that only fill a call up."""
        return np.array([*(row.number for row in rows), *[self.max_rows] * fill])


def round_up(count: int) -> int:
    """The next power of two, or 0.

    >>> round_up(0), round_up(5), round_up(8)
    (0, 8, 8)
    """
    return count and 1 << (count - 1).bit_length()
