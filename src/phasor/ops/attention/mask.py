"""Which keys a query sees, kept as a rule. The rule is turned into a mask only for one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


@dataclass(frozen=True)
class Mask:
    """A rule over queries and keys. Every query sees the key at its own index, so no row is ever empty.

    `window` counts keys including the query's own: distances below it are seen. `sink_tokens` keep the first
    tokens of a sequence visible past the window; `prefix_length` makes the first tokens of each row visible to all.
    `query_document_ids`/`key_document_ids` keep documents apart, `key_mask` is True for real keys, and `order`
    (None where it is the index) counts the real tokens of each document. In cross-attention (`aligned`
    False) queries and keys are different sequences: only documents and padding apply.

    With a cache there are more keys than queries: `offset` is the first query's index where the keys stand in
    order, and otherwise `query_at` and `key_at` give the index of each, `[B or 1, ...]`.
    """

    causal: bool = False
    window: int | None = None
    sink_tokens: int = 0
    prefix_length: Tensor | None = None
    key_mask: Tensor | None = None
    query_document_ids: Tensor | None = None
    key_document_ids: Tensor | None = None
    order: Tensor | None = None
    aligned: bool = True
    offset: int = 0
    query_at: Tensor | None = None
    key_at: Tensor | None = None
    memo: dict[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def narrowed(self, window: int | None, sink_tokens: int) -> Mask:
        """The same rule with a layer's own window."""
        if window is None or not self.aligned:
            return self
        return replace(self, window=window, sink_tokens=sink_tokens)

    def sees_all(self, keys: int) -> bool:
        """Whether every query sees every key (or, if causal, every key up to its own)."""
        return (
            self.prefix_length is None
            and self.key_mask is None
            and self.key_document_ids is None
            and self.query_at is None
            and (self.window is None or self.window >= keys)
        )

    def only_padding(self, keys: int) -> bool:
        """Whether all that is hidden are padding keys, so that the mask has one row for all queries."""
        unordered = self.prefix_length is None and self.key_document_ids is None and not self.causal
        return unordered and self.key_mask is not None and (self.window is None or self.window >= keys)

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """Ranges of keys that hold everything the queries `start` to `stop` may see."""
        if not self.aligned or self.query_at is not None:
            return [(0, keys)]
        start, stop = start + self.offset, stop + self.offset
        last = keys if self.prefix_length is not None or not self.causal else min(stop, keys)
        if self.window is None or self.prefix_length is not None:
            return [(0, last)]
        first = max(0, start - self.window + 1)
        last = min(last, stop + self.window - 1)
        if not self.sink_tokens or first == 0:
            return [(first, last)]
        if self.order is not None:  # sinks stand at the start of every document, wherever that is
            return [(0, last)]
        return [(0, min(self.sink_tokens, first)), (first, last)]

    def row(self, k: Tensor) -> Tensor | None:
        """What a single query sees of keys `[B, S, ...]`, `[B or 1, 1, 1, S]`; the same for every layer that asks."""
        return self.kept("row", (k.shape[1],), self._row, k)

    def _row(self, k: Tensor) -> Tensor | None:
        places = torch.arange(k.shape[1], device=k.device)
        seen = self.block(places[:1], places)
        return None if seen is None else seen[:, None]

    def kept(self, what: str, key: tuple[int | Tensor, ...], make: Callable[..., Made], *about: Any) -> Made:
        """What `make` makes of the mask, made once for all layers that ask with the same numbers and tensors."""
        if what not in self.memo or not same(self.memo[what][0], key):
            self.memo[what] = key, make(*about)
        return self.memo[what][1]

    def is_sink(self, keys: Tensor) -> Tensor:
        """Which of the keys, given by their place, are sink tokens; `[B or 1, keys]`."""
        return self._order(keys) < self.sink_tokens

    def _order(self, keys: Tensor) -> Tensor:
        """For each key how many tokens of its sequence stand before it."""
        if self.order is not None:
            return self.order[:, keys]
        return keys[None] if self.key_at is None else self.key_at[:, keys]

    def block(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where the queries see the keys, both given by their place; `[B or 1, queries, keys]`, None for all."""
        row = (queries[None] + self.offset if self.query_at is None else self.query_at[:, queries])[:, :, None]
        at = keys[None] if self.key_at is None else self.key_at[:, keys]
        column = at[:, None, :]
        seen: Tensor | None = None
        if self.aligned and self.window is not None:
            seen = row - column < self.window
            if not self.causal:
                seen = seen & (column - row < self.window)
            if self.sink_tokens:
                seen = seen | self.is_sink(keys)[:, None, :]
        if self.aligned and self.causal:
            seen = both(seen, column <= row)
        if self.prefix_length is not None and seen is not None:
            seen = seen | (self._order(keys) < self.prefix_length[:, None])[:, None, :]
        if self.key_document_ids is not None and self.query_document_ids is not None:
            same = self.query_document_ids[:, queries][:, :, None] == self.key_document_ids[:, keys][:, None, :]
            seen = both(seen, same)
        if self.key_mask is not None:
            seen = both(seen, self.key_mask[:, keys][:, None, :])
        return seen if seen is None or not self.aligned else seen | (row == column)


def same(a: tuple[int | Tensor, ...], b: tuple[int | Tensor, ...]) -> bool:
    """Whether two keys are the same numbers and the very same tensors."""
    return all(x == y if isinstance(x, int) else x is y for x, y in zip(a, b, strict=True))


def both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def full(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """The whole mask, `[B or 1, queries, keys]`: for references and for looking at, not for speed."""
    return mask.block(torch.arange(queries, device=device), torch.arange(keys, device=device))
