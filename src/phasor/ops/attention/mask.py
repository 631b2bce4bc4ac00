"""Which keys a query sees, kept as a rule: a mask tensor is made only for one block at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Pattern(Protocol):
    """A rule of sparse attention, over the indices that tokens have in their sequence."""

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where queries attend to keys, whose indices are broadcast against each other; None for all."""
        ...

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """Ranges in rising order of the keys that the queries `start` to `stop` may see, out of that many."""
        ...

    @property
    def query_block(self) -> int | None:
        """How many queries in a row see nearly the same keys; None for any number of them."""
        ...


@dataclass(frozen=True)
class PreparedMask:
    """What kernels need of a mask, as tensors; None for what they do not, or have to find themselves.

    `bounds`, `query_ranges` and `shifts` are what the functions of `intervals` give, `row` the keys that a single query
    sees, `[B or 1, 1, 1, S]`, `fold` how the tokens of a pattern become rows, and `scan` how a recurrence goes
    through the tokens.
    """

    bounds: Tensor | None = None
    query_ranges: Tensor | None = None
    shifts: Tensor | None = None
    row: Tensor | None = None
    fold: Any = None
    scan: Any = None


NOT_PREPARED = PreparedMask()


@dataclass(frozen=True)
class Mask:
    """A rule over queries and keys. Every query sees the key at its own index, so no row is ever empty.

    `window` counts keys including the query's own: distances below it are seen. `sink_tokens` keep the first
    tokens of a sequence visible past the window; `prefix_length` makes the first tokens of each row visible to all.
    `query_document_ids`/`key_document_ids` keep documents apart, `key_mask` is True for real keys, and `order`
    (None where it is the index) counts the real tokens of each document. In cross-attention (`aligned`
    False) queries and keys are different sequences: only documents and padding apply.

    With a cache there are more keys than queries: `offset` is the first query's index where the keys are in order,
    and otherwise `query_index` and `key_index` give the index of each, `[B or 1, ...]`.

    Sparse attention has a `pattern` besides, which goes by the index that tokens have in their sequence: by `order`
    where it is given, and else by the index, counted from `first_key`, the index of the first key that is there.

    >>> Mask(causal=True, window=2).block(torch.arange(3), torch.arange(3))[0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
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
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    pattern: Pattern | None = None
    first_key: int = 0
    prepared: PreparedMask = field(default=NOT_PREPARED, init=False, compare=False, repr=False)

    def attach(self, prepared: PreparedMask) -> Mask:
        """This mask with what kernels need of it; a mask that is derived from it has nothing prepared."""
        mask = replace(self)
        object.__setattr__(mask, "prepared", prepared)
        return mask

    def with_window(self, window: int | None, sink_tokens: int) -> Mask:
        """This mask with a layer's own window."""
        if window is None or not self.aligned:
            return self
        return replace(self, window=window, sink_tokens=sink_tokens)

    def with_pattern(self, pattern: Pattern | None) -> Mask:
        """This mask with a layer's own pattern of sparse attention."""
        if pattern is not None and self.prefix_length is not None:
            raise ValueError("prefix_length is for models without sparse attention, which would hide the prefix")
        return self if pattern is None else replace(self, pattern=pattern)

    def sees_all(self, keys: int) -> bool:
        """Whether every query sees every key (or, if causal, every key up to its own)."""
        return (
            self.pattern is None
            and self.prefix_length is None
            and self.key_mask is None
            and self.key_document_ids is None
            and self.query_index is None
            and (self.window is None or self.window >= keys)
        )

    @property
    def is_causal(self) -> bool:
        """Whether the mask, where every query sees every key up to its own, is what SDPA calls `is_causal`."""
        return self.causal and self.aligned and self.offset == 0

    @property
    def follows_cache(self) -> bool:
        """Whether the queries come after others whose keys are in a cache."""
        return self.offset != 0 or self.query_index is not None

    def hides_only_padding(self, keys: int) -> bool:
        """Whether all that is hidden are padding keys, so that the mask has one row for all queries."""
        unordered = self.prefix_length is None and self.key_document_ids is None and self.pattern is None
        return (
            unordered and not self.causal and self.key_mask is not None and (self.window is None or self.window >= keys)
        )

    def visible_distances(self, queries: int, keys: int) -> tuple[int, int]:
        """The least and the greatest distance that there may be to a key that is seen, where positions count tokens.

        >>> Mask(causal=True).visible_distances(5, 5), Mask(window=3).visible_distances(5, 5)
        ((0, 4), (-2, 2))
        """
        least, most = 1 - keys, (keys if self.aligned else queries) - 1
        if self.aligned and self.prefix_length is None:
            least = 0 if self.causal else least
            if self.window is not None and not self.sink_tokens:
                least, most = max(least, 1 - self.window), min(most, self.window - 1)
        return least, most

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """Ranges of keys that hold everything the queries `start` to `stop` may see."""
        ranges = self._mask_ranges(start, stop, keys)
        if self.pattern is None or not self.aligned or self.order is not None or self.query_index is not None:
            return ranges
        first = self.first_key
        start, stop = start + self.offset + first, stop + self.offset + first
        shown = [(a - first, b - first) for a, b in self.pattern.key_ranges(start, stop, keys + first)]
        pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in shown)
        return [(a, b) for a, b in pairs if a < b]

    def _mask_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """The ranges without the pattern."""
        if not self.aligned or self.query_index is not None:
            return [(0, keys)]
        start, stop = start + self.offset, stop + self.offset
        last = keys if self.prefix_length is not None or not self.causal else min(stop, keys)
        if self.window is None or self.prefix_length is not None:
            return [(0, last)]
        first = max(0, start - self.window + 1)
        last = min(last, stop + self.window - 1)
        if not self.sink_tokens or first == 0:
            return [(first, last)]
        if self.order is not None:  # sinks are at the start of every document, wherever that is
            return [(0, last)]
        return [(0, min(self.sink_tokens, first)), (first, last)]

    def row(self, k: Tensor) -> Tensor | None:
        """Which of the keys `[B, S, ...]` a single query sees, `[B or 1, 1, 1, S]`; None for all."""
        return self.find_row(k.shape[1], k.device) if self.prepared.row is None else self.prepared.row

    def find_row(self, keys: int, device: torch.device) -> Tensor | None:
        """The row, where it was not prepared."""
        index = torch.arange(keys, device=device)
        visible = self.block(index[:1], index)
        return None if visible is None else visible[:, None]

    def is_sink(self, keys: Tensor) -> Tensor:
        """Which of the keys, given by their index, are sink tokens; `[B or 1, keys]`."""
        return self._order(keys) < self.sink_tokens

    def _order(self, keys: Tensor) -> Tensor:
        """For each key how many tokens of its sequence come before it."""
        if self.order is not None:
            return self.order[:, keys]
        return keys[None] if self.key_index is None else self.key_index[:, keys]

    def token_indices(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The indices that queries and keys have in their sequence, `[B or 1, queries]` and `[B or 1, keys]`."""
        if self.order is not None:
            return self.at_queries(self.order, queries), self.order[:, keys]
        row = queries[None] + self.offset if self.query_index is None else self.query_index[:, queries]
        column = keys[None] if self.key_index is None else self.key_index[:, keys]
        return row + self.first_key, column + self.first_key

    def at_queries(self, per_key: Tensor, queries: Tensor) -> Tensor:
        """What each key has, `[B, keys]`, for the tokens of the queries: those may be some of the keys."""
        if self.query_index is None:
            return per_key[:, queries]
        return per_key.gather(1, self.query_index[:, queries].expand(len(per_key), -1))

    def block(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where the queries see the keys, both given by their index; `[B or 1, queries, keys]`, None for all."""
        row = (queries[None] + self.offset if self.query_index is None else self.query_index[:, queries])[:, :, None]
        column = (keys[None] if self.key_index is None else self.key_index[:, keys])[:, None, :]
        visible: Tensor | None = None
        if self.aligned and self.window is not None:
            visible = row - column < self.window
            if not self.causal:
                visible = visible & (column - row < self.window)
            if self.sink_tokens:
                visible = visible | self.is_sink(keys)[:, None, :]
        if self.aligned and self.causal:
            visible = logical_and(visible, column <= row)
        if self.aligned and self.pattern is not None:
            q_index, k_index = self.token_indices(queries, keys)
            shown = self.pattern.visible(q_index[:, :, None], k_index[:, None, :])
            visible = visible if shown is None else logical_and(visible, shown)
        if self.prefix_length is not None and visible is not None:
            visible = visible | (self._order(keys) < self.prefix_length[:, None])[:, None, :]
        if self.key_document_ids is not None and self.query_document_ids is not None:
            same = self.query_document_ids[:, queries][:, :, None] == self.key_document_ids[:, keys][:, None, :]
            visible = logical_and(visible, same)
        if self.key_mask is not None:
            visible = logical_and(visible, self.key_mask[:, keys][:, None, :])
        return visible if visible is None or not self.aligned else visible | (row == column)


SEES_ALL = Mask()


def logical_and(a: Tensor | None, b: Tensor) -> Tensor:
    """Both, where None is True everywhere."""
    return b if a is None else a & b


def dense_mask(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """The mask of all queries by all keys, `[B or 1, queries, keys]`: for references and inspection, not for speed."""
    return mask.block(torch.arange(queries, device=device), torch.arange(keys, device=device))
