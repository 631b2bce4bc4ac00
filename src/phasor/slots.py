"""Slots: where a layer's cache keeps its tokens, and how they come into it.

The first `sinks` tokens of a row have slots of their own, the others go around a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Store:
    """A tensor of slots `[B, slots, ...]` and how tokens come into it."""

    data: Tensor
    layout: Layout

    def write(self, new: Tensor, counts: Sequence[int], kept: Sequence[Tensor] | None) -> None:
        """Put the tokens `new[:, t]` behind the `counts` tokens each row holds; `kept` names the real ones a row."""
        new = new.detach().to(self.data.dtype)
        if kept is None and new.shape[1] == 1 and len(set(counts)) == 1:
            self.data.select(1, self.layout.slot(counts[0])).copy_(new[:, 0])
        elif kept is None and len(set(counts)) == 1:
            for slots, tokens in self.layout.segments(counts[0], counts[0] + new.shape[1]):
                self.data[:, slots] = new[:, tokens]
        elif kept is None and new.shape[1] == 1:
            one_each = torch.tensor([self.layout.slot(n) for n in counts], device=self.data.device)
            self.data[torch.arange(len(counts), device=self.data.device), one_each] = new[:, 0]
        else:
            for row, count in enumerate(counts):
                real = new[row] if kept is None else new[row, kept[row]]
                for slots, tokens in self.layout.segments(count, count + len(real)):
                    self.data[row, slots] = real[tokens]


@dataclass(frozen=True)
class Turn:
    """One call's way through one layout: which rows hold how much before it, and how keys are come by.

    A first call attends to its own tokens. Later ones write their tokens and attend to the slots; or, where
    several tokens come into a ring and would push out what the first of them still sees, attend to the old
    slots and the new tokens side by side.
    """

    before: list[int]
    after: list[int]
    kept: list[Tensor] | None
    how: Literal["fresh", "slots", "joined"]

    def extend(self, store: Store, new: Tensor) -> Tensor:
        """Write new tokens and give all that is attended to."""
        if self.how == "joined":
            old = store.data[:, : store.layout.filled(max(self.before))]
            new = torch.cat((old, added := new.to(old.dtype)), dim=1)
            store.write(added, self.before, self.kept)
            return new
        store.write(new, self.before, self.kept)
        return store.data[:, : store.layout.filled(max(self.after))] if self.how == "slots" else new
