"""Slots: where a layer's cache keeps its tokens, and how new tokens are written into it.

The first `sinks` tokens of a row have fixed slots; the others go into a ring buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EMPTY = 1 << 62  # the token index of an empty slot: after every query, so that a causal mask hides it


@dataclass(frozen=True)
class SlotLayout:
    """How a layer's slots are used: `sinks` fixed ones, then a ring of `ring`."""

    sinks: int
    ring: int
    window: int | None
    cap_sinks: bool = False  # whether the distance to the sinks is capped
    sparse: bool = False  # whether attention is sparse, so that a query does not see every token of the window
    state: bool = False  # whether the layer keeps a state, and of tokens no more than the positions of the last ones

    @property
    def slots(self) -> int:
        return self.sinks + self.ring

    def segments(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Slots for the tokens `start` to `stop` of a row, and which of those tokens: `(slots, tokens)` pairs.

        >>> [(a.start, a.stop, b.start, b.stop) for a, b in SlotLayout(1, 4, 4).segments(0, 7)]
        [(0, 1, 0, 1), (3, 5, 3, 5), (1, 3, 5, 7)]
        """
        if start < self.sinks:
            fixed = min(stop, self.sinks)
            yield slice(start, fixed), slice(0, fixed - start)
        token = max(start, self.sinks, stop - self.ring)
        while token < stop:
            slot = self.slot(token)
            run = min(stop - token, self.slots - slot)
            yield slice(slot, slot + run), slice(token - start, token - start + run)
            token += run

    def slot(self, token: int) -> int:
        """The slot of a row's token with that index."""
        return token if token < self.sinks else self.sinks + (token - self.sinks) % self.ring

    def slots_of(self, tokens: Tensor) -> Tensor:
        """The slots of tokens given by their index in a tensor.

        >>> SlotLayout(1, 4, 4).slots_of(torch.tensor([0, 4, 5])).tolist()
        [0, 4, 1]
        """
        return torch.where(tokens < self.sinks, tokens, self.sinks + (tokens - self.sinks) % self.ring)

    def slots_in_use(self, tokens: int) -> int:
        """How many of the slots, from the first on, can hold something after that many tokens."""
        return min(tokens, self.slots)

    def in_order(self, tokens: int) -> list[slice]:
        """The slots of the sinks and of all older tokens that the next one sees, in the order of the tokens.

        >>> [(x.start, x.stop) for x in SlotLayout(1, 4, 4).in_order(7)]
        [(0, 1), (4, 5), (1, 3)]
        """
        reach = tokens if self.window is None else self.window - 1
        first = max(self.sinks, tokens - reach)
        sinks = [slice(0, min(self.sinks, tokens))] if self.sinks else []
        return sinks + [slots for slots, _ in self.segments(first, tokens)]

    def token_index(self, counts: Tensor, slots: int) -> Tensor:
        """The index of the token in each slot for rows of `counts` tokens, `[B, slots]`; EMPTY where there is none.

        >>> SlotLayout(1, 4, 4).token_index(torch.tensor([7, 2]), 5).clamp(max=9).tolist()
        [[0, 5, 6, 3, 4], [0, 1, 9, 9, 9]]
        """
        slot = torch.arange(slots, device=counts.device)
        last = counts[:, None] - 1
        latest = last - (last - slot) % self.ring  # the newest token that was written to that slot
        token = torch.where(slot < self.sinks, slot, latest)
        lowest = torch.where(slot < self.sinks, 0, self.sinks)
        return torch.where((token >= lowest) & (token <= last), token, EMPTY)


class RingWrite:
    """Writes the tokens of one call into the slots of one layout, and gathers all that the call attends to.

    A first call attends to its own tokens ("first"). Later ones write their tokens and attend to the slots
    ("in_place"); or, where several tokens go into a ring and would overwrite what the first of them still sees, attend
    to the old slots concatenated with the new tokens ("concat"). Where all rows hold the same number of tokens, the old
    slots are taken in the order of their tokens, so that attention can skip what a window hides. `real_tokens` has the
    indices of the real tokens of every row, where some are padding.
    """

    def __init__(
        self,
        layout: SlotLayout,
        before: list[int],
        after: list[int],
        real_tokens: list[Tensor] | None,
        count: int,
        device: torch.device,
    ) -> None:
        self.before, self.after, self.real_tokens, self.layout = before, after, real_tokens, layout
        self.uniform = real_tokens is None and len(set(before)) == 1
        self.used_before, self.used_after = layout.slots_in_use(max(before)), layout.slots_in_use(max(after))
        self.mode: Literal["first", "in_place", "concat"] = "concat"
        if self.used_before == 0:
            self.mode = "first"
        elif layout.window is None or count == 1:
            self.mode = "in_place"
        # The old slots that "concat" takes, and how many they are.
        self.old: list[slice] = []
        if self.mode == "concat":
            self.old = layout.in_order(before[0]) if self.uniform else [slice(0, self.used_before)]
        self.num_old = sum(slots.stop - slots.start for slots in self.old)
        self.slot = layout.slot(before[0]) if self.uniform and count == 1 else None
        self.slot_per_row: tuple[Tensor, Tensor] | None = None
        if real_tokens is None and count == 1 and not self.uniform:
            slots = torch.tensor([layout.slot(n) for n in before], device=device)
            self.slot_per_row = torch.arange(len(before), device=device), slots

    def update(self, data: Tensor, new: Tensor) -> Tensor:
        """Write new tokens into slots `[B, slots, ...]` and return all that is attended to."""
        detached = new.detach() if new.requires_grad else new
        if self.mode == "first":
            self._write(data, detached)
            return new
        if self.mode == "concat":
            visible = new.new_empty((new.shape[0], self.num_old + new.shape[1], *new.shape[2:]))
            parts = [*(data[:, slots] for slots in self.old), detached]
            for place, part in zip(visible.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
                place.copy_(part)  # faster than `torch.cat` where the new tokens are a view of a projection
            self._write(data, detached)
            return visible
        self._write(data, detached)
        visible = data.narrow(1, 0, self.used_after)
        return visible if visible.dtype == new.dtype else visible.to(new.dtype)

    def last(self, data: Tensor) -> Tensor:
        """The entry of each row's last token before this call, `[B, ...]`; zeros for rows that hold none."""
        return last_entries(data, self.layout, self.before)

    def _write(self, data: Tensor, new: Tensor) -> None:
        if self.slot is not None:
            data.select(1, self.slot).copy_(new.select(1, 0))
        elif self.slot_per_row is not None:
            data[self.slot_per_row] = new[:, 0].to(data.dtype)
        elif self.uniform:
            for slots, tokens in self.layout.segments(self.before[0], self.after[0]):
                data[:, slots] = new[:, tokens]
        else:
            for row, (start, stop) in enumerate(zip(self.before, self.after, strict=True)):
                real = new[row] if self.real_tokens is None else new[row, self.real_tokens[row]]
                for slots, tokens in self.layout.segments(start, stop):
                    data[row, slots] = real[tokens]


def last_entries(data: Tensor, layout: SlotLayout, counts: list[int]) -> Tensor:
    """The entry of each row's last token out of slots `[B, slots, ...]`; zeros for rows that hold none.

    >>> last_entries(torch.tensor([[5, 6, 7], [8, 9, 0]]), SlotLayout(0, 3, None), [2, 0]).tolist()
    [6, 0]
    """
    slots = torch.tensor([layout.slot(n - 1) if n else 0 for n in counts], device=data.device)
    entries = data[torch.arange(len(counts), device=data.device), slots]
    held = torch.tensor(counts, device=data.device) > 0
    return torch.where(held.view(-1, *[1] * (entries.dim() - 1)), entries, 0)
