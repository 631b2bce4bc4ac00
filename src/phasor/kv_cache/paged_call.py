"""One call over some rows of a paged cache: what a forward needs of it, by the protocol of all caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.kv_cache.page_table import PageTable, to_device
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.slots import EMPTY
from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import SequenceArgs, SequenceInfo, token_order
from phasor.ops.attention import Mask

if TYPE_CHECKING:
    from phasor.kv_cache.paged import PagedKVCache, PagedRow


@dataclass(frozen=True)
class PagedWrite:
    """Writes new tokens into their slots, and gathers all tokens that are attended to.

    `slots` are those of all new tokens that are kept, one row after the other, and `real` says which they are of those
    of the first `rows` rows; None stands for all. `pages` `[B, n]` are gathered, of which the slots `span` hold the
    keys; in a first call there are none, and rows attend to the new tokens. `last` is the slot of each row's last token
    before the call, where `has_last`.
    """

    slots: Tensor
    real: Tensor | None
    rows: int
    pages: Tensor | None
    span: slice
    last: Tensor
    has_last: Tensor

    def update(self, data: Tensor, new: Tensor) -> Tensor:
        """Write new tokens `[B, T, ...]` into pages `[pages, page_size, ...]`; all that is attended to."""
        kept = new[: self.rows].flatten(0, 1)
        kept = kept if self.real is None else kept.index_select(0, self.real)
        data.view(-1, *data.shape[2:])[self.slots] = kept.detach().to(data.dtype)
        if self.pages is None:
            return new
        found = data.index_select(0, self.pages.flatten())  # [B * n, page_size, ...]
        return found.view(len(self.pages), -1, *data.shape[2:])[:, self.span].to(new.dtype)

    def last_entries(self, data: Tensor) -> Tensor:
        """What each row's last token before the call has; zeros where there is none."""
        entries = data.view(-1, *data.shape[2:])[self.last]
        return torch.where(self.has_last.view(-1, *[1] * (entries.dim() - 1)), entries, 0)


@dataclass(slots=True, eq=False)
class PagedLayerStep(LayerStep):
    """One layer in one call over pages."""

    write: PagedWrite | None  # None where a layer keeps no tokens
    tensors: dict[str, Tensor]
    rows: Tensor  # [B], by which the layer keeps states

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        if self.write is None:
            return LayerStep.update(self, **new)
        return tuple(self.write.update(self.tensors[name], x) for name, x in new.items())

    def last(self, name: str) -> Tensor | None:
        return None if self.write is None else self.write.last_entries(self.tensors[name])

    def state(self, name: str) -> Tensor | None:
        return None if self.states is None else self.states[name][self.rows]

    def store(self, **new: Tensor) -> None:
        if self.states is not None:
            for name, x in new.items():
                self.states[name][self.rows] = x.detach().to(self.states[name].dtype)


class PagedCall:
    """The next tokens of some rows of a `PagedKVCache`, made by its `call`."""

    def __init__(
        self,
        cache: PagedKVCache,
        rows: Sequence[PagedRow],
        new: Sequence[int] | None,
        fill: int,
        round_up: bool,
        config: ModelConfig,
    ) -> None:
        self.cache, self.rows, self.fill, self.round_up, self.config = cache, rows, fill, round_up, config
        self.known_new = None if new is None else np.array([*new, *[1] * fill])
        self.numbers = cache.numbers(rows, fill)
        self.before = np.array([*(row.count for row in rows), *[0] * fill])
        schemes = (config.input_position, *(config.layer(i).position for i in range(config.num_layers)))
        self.needs_length = any(scheme.depends_on_length for scheme in schemes)
        self.memory: EncoderOutput | None = None
        self.cross: list[dict[str, Tensor]] = []
        if cache.cross and rows and rows[0].source_length:
            self._take_sources()

    def _take_sources(self) -> None:
        """What cross-attention keeps of the rows' sources, which were read before."""
        cache, sizes = self.cache, np.array([*(row.source_length for row in self.rows), *[1] * self.fill])
        rows, longest = to_device(self.numbers, cache.device), int(sizes.max())
        if self.round_up:
            longest = 1 << (longest - 1).bit_length()
        self.cross = [{name: x[:, :longest][rows] for name, x in tensors.items()} for tensors in cache.cross]
        real = torch.arange(longest, device=cache.device) < to_device(sizes, cache.device)[:, None]
        hidden = torch.empty(len(rows), 0, self.config.for_side("encoder").dim, dtype=cache.dtype, device=cache.device)
        self.memory = EncoderOutput(hidden, real)

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """Positions and lengths of the next tokens, which follow those held."""
        rows, count = tokens.shape
        if rows != len(self.numbers):
            raise ValueError(f"the call is for {len(self.numbers)} rows, and the tokens have {rows}")
        given = [name for name, value in args.items() if value is not None and name != "attention_mask"]
        if given:
            raise ValueError(f"a paged cache takes no {given[0]}: its tokens follow those it holds")
        attention_mask = args.get("attention_mask")
        before = to_device(self.before, tokens.device)
        order = token_order(attention_mask, None)
        new = torch.arange(count, device=tokens.device) if order is None else order
        lengths = [row.length or 1 for row in self.rows] + [1] * self.fill
        length: int | Tensor = count
        if self.needs_length:
            length = lengths[0]
            if len(set(lengths)) > 1:
                length = torch.tensor(lengths, device="cpu")[:, None].expand(rows, count)
        first = torch.zeros_like(before)[:, None] if self.before.any() else None
        return SequenceInfo(before[:, None] + new, length, attention_mask, None, order, first)

    def begin(self, seq: SequenceInfo, mask: Mask) -> list[PagedLayerStep]:
        """Start a call: a step per layer. `mask` is the mask among the tokens of the call itself."""
        if mask.prefix_length is not None:
            raise ValueError("a paged cache takes no prefix_length")
        cache, rows, count = self.cache, to_device(self.numbers, self.cache.device), seq.rows.shape[-1]
        real = seq.attention_mask
        if real is None:
            self.new = np.full(len(self.numbers), count)
        else:
            self.new = real.sum(1).cpu().numpy() if self.known_new is None else self.known_new
        by_layout = {layout: self._write(table, seq, mask) for layout, table in cache.tables.items()}
        steps = []
        for layout, tensors, states in zip(cache.layouts, cache.layers, cache.states, strict=True):
            own_mask, positions, write = (mask, seq.rows, None) if layout.state else by_layout[layout]
            steps.append(PagedLayerStep(own_mask, positions, write, tensors, rows, states=states))
        return steps

    def _write(self, table: PageTable, seq: SequenceInfo, mask: Mask) -> tuple[Mask, Tensor, PagedWrite]:
        """The mask of the layers that keep the same tokens, the positions of their keys, and their write."""
        before, after, kept, device = self.before, self.before + self.new, len(self.rows), self.cache.device
        count, real = seq.rows.shape[-1], seq.attention_mask
        tokens = np.minimum(before[:, None] + np.arange(count), after[:, None] - 1)
        slots = table.slots(self.numbers[:kept], tokens[:kept])
        if real is not None:  # real tokens of a row follow each other, wherever its padding is
            slots = slots[np.arange(count) < self.new[:kept, None]]
            real = self._real_tokens(real[:kept])
        last = table.slots(self.numbers, np.maximum(before - 1, 0)[:, None])[:, 0]
        write = PagedWrite(
            to_device(slots.flatten(), device),
            real,
            kept,
            None,
            slice(None),
            to_device(last, device),
            to_device(before, device) > 0,
        )
        if not before.any():
            return mask, seq.rows, write
        if len(before) == 1 and real is None and not table.sink_blocks:
            return self._one_row(table, write)
        keys = table.keys(self.numbers, before, after, device, round_up=self.round_up)
        size = keys.pages.shape[1] * self.cache.page_size
        index = torch.arange(size, device=device)[None] if keys.tokens is None else keys.tokens
        causal = Mask(causal=True, query_index=seq.rows, key_index=keys.tokens)
        return causal, index.masked_fill(index == EMPTY, 0), replace(write, pages=keys.pages)

    def _real_tokens(self, real: Tensor) -> Tensor:
        """Which of the tokens of all rows are real: on a GPU that is waited for, unless their numbers are known."""
        if self.known_new is None:
            return real.flatten().nonzero()[:, 0]
        rows, count = real.shape
        is_real = np.arange(count) >= count - self.known_new[:rows, None]
        return to_device(np.flatnonzero(is_real), real.device)

    def _one_row(self, table: PageTable, write: PagedWrite) -> tuple[Mask, Tensor, PagedWrite]:
        """Keys in the order of their positions, from the first that the window reaches to the last."""
        before, after, device = int(self.before[0]), int(self.before[0] + self.new[0]), self.cache.device
        keys = table.keys(self.numbers, self.before, self.before + self.new, device)
        window, first_block = table.layout.window, table.first_in_reach(before)
        first = 0 if window is None else max(0, before - window + 1)
        start = first - first_block * self.cache.page_size
        span = slice(start, start + after - first)
        causal = Mask(causal=True, offset=before - first, first_key=first)
        positions = torch.arange(first, after, device=device)[None]
        return causal, positions, replace(write, pages=keys.pages, span=span)

    def commit(self) -> None:
        """Count the new tokens of the rows."""
        self.cache.commit(self.rows, self.new[: len(self.rows)].tolist())
