"""Slots: where a layer's cache keeps its tokens, and how they come into it.

The first `sinks` tokens of a row have slots of their own, the others go around a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EMPTY = 1 << 62  # the index of a slot that holds nothing: after every query


@dataclass(frozen=True)
class Layout:
    """How a layer's slots are used: `sinks` fixed ones, then a ring of `ring`."""

    sinks: int
    ring: int
    window: int | None
    capped: bool = False  # whether the distance to the sinks is

    @property
    def slots(self) -> int:
        return self.sinks + self.ring

    def segments(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Slots for the tokens `start` to `stop` of a row, and which of those tokens: `(slots, tokens)` pairs.

        >>> [(a.start, a.stop, b.start, b.stop) for a, b in Layout(1, 4, 4).segments(0, 7)]
        [(0, 1, 0, 1), (3, 5, 3, 5), (1, 3, 5, 7)]
        """
        if start < self.sinks:
            fixed = min(stop, self.sinks)
            yield slice(start, fixed), slice(0, fixed - start)
        at = max(start, self.sinks, stop - self.ring)
        while at < stop:
            slot = self.slot(at)
            run = min(stop - at, self.slots - slot)
            yield slice(slot, slot + run), slice(at - start, at - start + run)
            at += run

    def slot(self, token: int) -> int:
        """Where a row's token of that index is put."""
        return token if token < self.sinks else self.sinks + (token - self.sinks) % self.ring

    def filled(self, tokens: int) -> int:
        """How many of the slots, from the first on, may hold something after so many tokens."""
        return min(tokens, self.slots)

    def held(self, counts: Tensor, slots: int) -> Tensor:
        """Which token each slot holds in rows of `counts` tokens, `[B, slots]`; EMPTY where none.

        >>> Layout(1, 4, 4).held(torch.tensor([7, 2]), 5).clamp(max=9).tolist()
        [[0, 5, 6, 3, 4], [0, 1, 9, 9, 9]]
        """
        slot = torch.arange(slots, device=counts.device)
        last = counts[:, None] - 1
        latest = last - (last - slot) % self.ring  # the newest token of that slot's turn of the ring
        token = torch.where(slot < self.sinks, slot, latest)
        lowest = torch.where(slot < self.sinks, 0, self.sinks)
        return torch.where((token >= lowest) & (token <= last), token, EMPTY)


@dataclass(slots=True)
class Store:
    """A tensor of slots `[B, slots, ...]` and how they are used."""

    data: Tensor
    layout: Layout


class Turn:
    """One call's way through one layout: where its tokens go, and how what is attended to is come by.

    A first call attends to its own tokens. Later ones write their tokens and attend to the slots; or, where
    several tokens come into a ring and would push out what the first of them still sees, attend to the old
    slots and the new tokens side by side. `kept` names the real tokens of every row, where some are padding.
    """

    def __init__(
        self,
        layout: Layout,
        before: list[int],
        after: list[int],
        kept: list[Tensor] | None,
        count: int,
        device: torch.device,
    ) -> None:
        self.before, self.after, self.kept, self.layout = before, after, kept, layout
        self.uniform = kept is None and len(set(before)) == 1
        self.held, self.filled = layout.filled(max(before)), layout.filled(max(after))
        self.how: Literal["fresh", "slots", "joined"] = "joined"
        if self.held == 0:
            self.how = "fresh"
        elif layout.window is None or count == 1:
            self.how = "slots"
        self.slot = layout.slot(before[0]) if self.uniform and count == 1 else None
        self.slot_of_row: tuple[Tensor, Tensor] | None = None
        if kept is None and count == 1 and not self.uniform:
            slots = torch.tensor([layout.slot(n) for n in before], device=device)
            self.slot_of_row = torch.arange(len(before), device=device), slots

    def extend(self, store: Store, new: Tensor) -> Tensor:
        """Write new tokens and give all that is attended to."""
        data = store.data
        kept = new.detach() if new.requires_grad else new
        if self.how == "fresh":
            self._write(data, kept)
            return new
        if self.how == "joined":
            seen = torch.cat((data[:, : self.held].to(new.dtype), kept), dim=1)
            self._write(data, kept)
            return seen
        self._write(data, kept)
        seen = data.narrow(1, 0, self.filled)
        return seen if seen.dtype == new.dtype else seen.to(new.dtype)

    def _write(self, data: Tensor, new: Tensor) -> None:
        if self.slot is not None:
            data.select(1, self.slot).copy_(new.select(1, 0))
        elif self.slot_of_row is not None:
            data[self.slot_of_row] = new[:, 0].to(data.dtype)
        elif self.uniform:
            for slots, tokens in self.layout.segments(self.before[0], self.after[0]):
                data[:, slots] = new[:, tokens]
        else:
            for row, (start, stop) in enumerate(zip(self.before, self.after, strict=True)):
                real = new[row] if self.kept is None else new[row, self.kept[row]]
                for slots, tokens in self.layout.segments(start, stop):
                    data[row, slots] = real[tokens]
