"""The static paged cache: a token of each of some rows of a paged cache, in tensors of fixed shape and address.

So one CUDA graph serves all steps of as many rows, whichever they are and wherever their pages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasor.kv_cache.page_table import PageLayout, to_device
from phasor.kv_cache.paged import PagedKVCache, PagedRow
from phasor.kv_cache.paged_call import PagedLayerStep, PagedWrite
from phasor.kv_cache.pages import NULL_PAGE
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.slots import EMPTY, SlotLayout
from phasor.nn.sequence import SequenceArgs, SequenceInfo
from phasor.ops.attention import Mask


@dataclass(frozen=True)
class StaticPagedWrite(PagedWrite):
    """Rows without a page, which only fill a step up, write zeros into the null page."""

    def update(self, data: Tensor, new: Tensor) -> Tensor:
        has_page = (self.slots // data.shape[1] != NULL_PAGE).view(-1, *[1] * (new.dim() - 1))
        return PagedWrite.update(self, data, torch.where(has_page, new, 0))


class StaticPagedKVCache:
    """What a paged cache keeps, in the same memory, for steps of one token of up to `batch_size` rows.

    `blocks` is the most pages that a row has in a layer without a window. `set_rows` says which rows steps are for; the
    paged cache itself is not updated.

    >>> from phasor import Transformer, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> cache = PagedKVCache(model.config, max_rows=4, pages=9, page_size=4)
    >>> tokens, row, steps = torch.randint(0, 50, (1, 9)), cache.new_row(), StaticPagedKVCache(cache, 2, blocks=4)
    >>> with torch.no_grad():
    ...     cache.reserve(row, 9)
    ...     first = model(tokens[:, :8], cache=cache.call([row]))
    ...     steps.set_rows([row])
    ...     last = model(tokens[:, 8:].expand(2, -1), cache=steps)[:1]
    ...     torch.allclose(torch.cat((first, last), dim=1), model(tokens), atol=1e-5)
    True
    """

    length: int | None = None  # frequencies depend on no length
    memory: EncoderOutput | None = None

    def __init__(self, cache: PagedKVCache, batch_size: int, blocks: int) -> None:
        self.cache, self.config = cache, cache.config
        self.layers, self.states, self.layouts = cache.layers, cache.states, cache.layouts
        self.cross: list[dict[str, Tensor]] = []
        self.counts = torch.zeros(batch_size, dtype=torch.int64, device=cache.device)
        self.next_positions, self.origins = self.counts.clone()[:, None], self.counts.clone()[:, None]
        self.numbers = torch.full_like(self.counts, cache.max_rows)
        self.pages = {
            layout: torch.full(
                (batch_size, table.most_blocks or blocks), NULL_PAGE, dtype=torch.int32, device=cache.device
            )
            for layout, table in cache.tables.items()
        }

    def set_rows(self, rows: Sequence[PagedRow]) -> None:
        """The rows of the next step, for whose tokens there are pages."""
        fill, device = len(self.counts) - len(rows), self.cache.device
        numbers, counts = self.cache.numbers(rows, fill), [*(row.count for row in rows), *[0] * fill]
        on_device = to_device(np.array([numbers, counts]), device)
        self.numbers.copy_(on_device[0])
        self.counts.copy_(on_device[1])
        self.next_positions.copy_(on_device[1][:, None])
        for layout, table in self.cache.tables.items():
            own = self.pages[layout]
            used = min(own.shape[1], table.entries.shape[1])
            own[:, :used].copy_(to_device(table.entries[numbers, :used], device, np.int32))

    def kernel_args(self, index: int) -> dict[str, Any]:
        """Where the decode kernels find what a layer keeps."""
        layout = self.layouts[index]
        return {"sink_tokens": layout.sinks, "window": layout.window, "pages": self.pages[layout]}

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """One token per row, right after those held."""
        if tokens.shape != self.next_positions.shape:
            rows = len(self.counts)
            raise ValueError(f"a static cache of {rows} rows takes tokens [{rows}, 1], not {list(tokens.shape)}")
        for name, value in args.items():
            if value is not None:
                raise ValueError(f"a static cache takes no {name}: its tokens follow those it holds")
        return SequenceInfo(self.next_positions, self.length, first=self.origins)

    def begin(self, seq: SequenceInfo, mask: Mask) -> list[PagedLayerStep]:
        by_layout = {layout: self._write(layout) for layout in self.pages}
        steps = []
        for layout, tensors, states in zip(self.layouts, self.layers, self.states, strict=True):
            own_mask, positions, write = (mask, seq.rows, None) if layout.state else by_layout[layout]
            steps.append(PagedLayerStep(own_mask, positions, write, tensors, self.numbers, states=states))
        return steps

    def _write(self, layout: PageLayout) -> tuple[Mask, Tensor, StaticPagedWrite]:
        """The mask of the layers that keep the same tokens, the positions of their keys, and their write."""
        size, pages, table = self.cache.page_size, self.pages[layout].long(), self.cache.tables[layout]
        sinks, num_slots = table.sink_blocks * size, pages.shape[1] * size
        slots = SlotLayout(sinks, num_slots - sinks, layout.window)

        def memory_slot(tokens: Tensor) -> Tensor:
            slot = slots.slots_of(tokens)
            return pages.gather(1, slot[:, None] // size)[:, 0] * size + slot % size

        last = (self.counts - 1).clamp(min=0)
        write = StaticPagedWrite(
            memory_slot(self.counts), None, len(pages), pages, slice(None), memory_slot(last), self.counts > 0
        )
        held = None if layout.window is None else slots.token_index(self.counts + 1, num_slots)
        causal = Mask(causal=True, query_index=self.counts[:, None], key_index=held)
        index = torch.arange(num_slots, device=pages.device)[None] if held is None else held
        return causal, index.masked_fill(index == EMPTY, 0), write

    def commit(self) -> None:
        self.counts.add_(1)
        self.next_positions.add_(1)
