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

from phasor.config import ModelConfig
from phasor.kv_cache.page_table import PageLayout
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


def new_choices(rows: int, device: torch.device) -> Tensor:
    """Memory for what was chosen last: the bits of tokens, and their logits.

    The first half is for the rows of a step, the second for rows that have read their prompts since.
    """
    return torch.zeros(2, 2 * rows, dtype=torch.float64, device=device)


class StaticPagedKVCache:
    """What a paged cache keeps, in the same memory, for steps of one token of up to `batch_size` rows.

    `blocks` is the most pages that a row has in a layer without a window. `set_rows` says which rows steps are for; the
    paged cache itself is not updated. Caches that share `chosen` continue each other's steps. `config` is that of a
    model whose positions differ from those of the cache's.

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

    def __init__(
        self,
        cache: PagedKVCache,
        batch_size: int,
        blocks: int,
        chosen: Tensor | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        self.cache, self.config = cache, cache.config if config is None else config
        self.layers, self.states, self.layouts = cache.layers, cache.states, cache.layouts
        self.cross: list[dict[str, Tensor]] = []
        self.batch_size = batch_size
        self.widths = {layout: table.most_blocks or blocks for layout, table in cache.tables.items()}
        # One tensor, so that all of it comes from the host by one copy.
        self.given = torch.zeros(self._split_size, dtype=torch.int64, device=cache.device)
        rows, self.pages = self._split(self.given)
        self.counts, self.numbers, self.places, self.new_tokens = rows[:4]
        self.next_positions, self.origins = rows[4][:, None], torch.zeros_like(rows[4])[:, None]
        self.numbers.fill_(cache.max_rows)
        self.chosen = new_choices(cache.max_rows, cache.device) if chosen is None else chosen
        self.latest = self.chosen[0].view(torch.int64)

    @property
    def _split_size(self) -> int:
        return 5 * self.batch_size + sum(-(-self.batch_size * width // 2) for width in self.widths.values())

    def _split(self, given: Tensor) -> tuple[Tensor, dict[PageLayout, Tensor]]:
        """What is given of rows, `[5, batch_size]`, and their pages, of 32 bits."""
        rows, pages, start = given[: 5 * self.batch_size].view(5, -1), {}, 10 * self.batch_size
        halves = given.view(torch.int32)
        for layout, width in self.widths.items():
            pages[layout] = halves[start : start + self.batch_size * width].view(-1, width)
            start += -(-self.batch_size * width // 2) * 2
        return rows, pages

    def set_rows(self, rows: Sequence[PagedRow], tokens: Sequence[int] = ()) -> None:
        """The rows of the next step, for whose tokens there are pages.

        `tokens` are what `take_tokens` takes: tokens, or `-1 - i` for entry `i` of those that were chosen last.
        """
        fill, on_gpu = self.batch_size - len(rows), self.cache.device.type == "cuda"
        host = torch.zeros(self._split_size, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        of_rows, pages = self._split(host)
        given, numbers = of_rows.numpy(), self.cache.numbers(rows, fill)
        given[0, : len(rows)] = given[4, : len(rows)] = [row.count for row in rows]
        given[1] = numbers
        given[3, : len(tokens)] = tokens
        given[2] = np.where(given[3] < 0, -1 - given[3], len(self.latest) + np.arange(self.batch_size))
        for layout, table in self.cache.tables.items():
            used = min(self.widths[layout], table.entries.shape[1])
            pages[layout].numpy()[:, :used] = table.entries[numbers, :used]
        self.given.copy_(host, non_blocking=True)

    def take_tokens(self, tokens: Tensor) -> None:
        """Write the tokens of the rows, those of the host and those that were chosen last, into `tokens`."""
        torch.index_select(torch.cat((self.latest, self.new_tokens)), 0, self.places, out=tokens)

    def keep_tokens(self, tokens: Tensor, logits: Tensor) -> None:
        """Keep the tokens that a step chose for the next one, and their logits, for the host."""
        self.latest[: self.batch_size] = tokens
        self.chosen[1, : self.batch_size] = logits.gather(1, tokens[:, None])[:, 0]

    @property
    def state_slots(self) -> Tensor:
        """Where the decode kernels find the states of each row, `[B]`."""
        return self.numbers

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
