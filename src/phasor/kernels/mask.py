"""Which keys a query sees, kept as a rule. The rule is turned into a mask only for one block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """A rule over queries and keys. Every query sees the key at its own index, so no row is ever empty.

    `window` counts keys including the query's own: distances below it are seen. `sink_tokens` keep the first
    tokens of a sequence visible past the window; `prefix` makes the first tokens of each row visible to all.
    `query_documents`/`key_documents` keep documents apart, `key_padding` is True for real keys, and `order`
    (None where it is the index) counts the real tokens of each document. In cross-attention (`aligned`
    False) queries and keys are different sequences: only documents and padding apply.
    """

    causal: bool = False
    window: int | None = None
    sink_tokens: int = 0
    prefix: Tensor | None = None
    key_padding: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    order: Tensor | None = None
    aligned: bool = True

    def narrowed(self, window: int | None, sink_tokens: int) -> Mask:
        """The same rule with a layer's own window."""
        if window is None:
            return self
        return Mask(**{**self.__dict__, "window": window, "sink_tokens": sink_tokens})

    def sees_all(self, keys: int) -> bool:
        """Whether every query sees every key (or, if causal, every key up to its own)."""
        return (
            self.prefix is None
            and self.key_padding is None
            and self.key_documents is None
            and (self.window is None or self.window >= keys)
        )

    def only_padding(self, keys: int) -> bool:
        """Whether all that is hidden are padding keys, so that the mask has one row for all queries."""
        unordered = self.prefix is None and self.key_documents is None and not self.causal
        return unordered and self.key_padding is not None and (self.window is None or self.window >= keys)

    def key_ranges(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """Ranges of keys that hold everything the queries `start` to `stop` may see."""
        if not self.aligned:
            return [(0, keys)]
        last = keys if self.prefix is not None or not self.causal else min(stop, keys)
        if self.window is None or self.prefix is not None:
            return [(0, last)]
        first = max(0, start - self.window + 1)
        last = min(last, stop + self.window - 1)
        if not self.sink_tokens or first == 0:
            return [(first, last)]
        if self.order is not None:  # sinks stand at the start of every document, wherever that is
            return [(0, last)]
        return [(0, min(self.sink_tokens, first)), (first, last)]

    def block(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where the queries see the keys, both given by index; `[B or 1, queries, keys]`, None for everywhere."""
        row, column = queries[:, None], keys[None, :]
        seen: Tensor | None = None

        def only(condition: Tensor) -> None:
            nonlocal seen
            seen = condition if seen is None else seen & condition

        if self.aligned and self.window is not None:
            near = row - column < self.window
            if not self.causal:
                near = near & (column - row < self.window)
            if self.sink_tokens:
                first = self.order[:, keys] if self.order is not None else keys[None]
                near = near | (first < self.sink_tokens)[:, None, :]
            only(near if near.dim() == 3 else near[None])
        if self.aligned and self.causal:
            before = (column <= row)[None]
            if self.prefix is not None:
                first = self.order[:, keys] if self.order is not None else keys[None]
                in_prefix = first < self.prefix[:, None]
                before = before | in_prefix[:, None, :]
                seen = None if seen is None else seen | in_prefix[:, None, :]
            only(before)
        if self.key_documents is not None and self.query_documents is not None:
            only(self.query_documents[:, queries][:, :, None] == self.key_documents[:, keys][:, None, :])
        if self.key_padding is not None:
            only(self.key_padding[:, keys][:, None, :])
        if seen is not None and self.aligned:
            seen = seen | (row == column)
        return seen


def full(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """The whole mask, `[B or 1, queries, keys]`: for references and for looking at, not for speed."""
    return mask.block(torch.arange(queries, device=device), torch.arange(keys, device=device))
