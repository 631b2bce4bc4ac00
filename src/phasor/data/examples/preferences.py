"""Preference pairs: a prompt with a reply that is preferred, and the same prompt with one that is rejected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from phasor.data.conversations import preferences
from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens
from phasor.data.examples.chat import TemplatedExamples
from phasor.data.packed import PairedRows
from phasor.data.split import Example, PlacedExample


class PreferencePairs(TemplatedExamples):
    """Two conversations that begin alike; what follows is trained."""

    sides = 4
    token_sides = (0, 2)
    unit = "preference"
    measured = "tokens on a side"
    batch_source = PairedRows

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        for pair in preferences(path, self.recipe.data, self.skipped):
            texts = ({"messages": pair.prompt, "tools": pair.tools}, pair.chosen, pair.rejected)
            yield PlacedExample((json.dumps(text, ensure_ascii=False) for text in texts), pair.where)

    def texts(self, example: Example) -> tuple[str, ...]:
        prompt, *replies = map(json.loads, example)
        return tuple(message["content"] for side in (prompt["messages"], *replies) for message in side)

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterator[tuple[Any, ...]]:
        for example in examples:
            report(sum(map(len, example)))
            prompt, chosen, rejected = map(json.loads, example)
            asked, tools = prompt["messages"], prompt["tools"]
            before = 0
            if any(message["role"] == "assistant" for message in asked):
                before = count_runs(self.encode_replies(tokenizers, asked, tools, example)[1])
            yield tuple(
                side
                for replies in (chosen, rejected)
                for side in skip_runs(*self.encode_replies(tokenizers, [*asked, *replies], tools, example), before)
            )


def count_runs(trained: Tokens) -> int:
    """How many replies there are in a row of 0 and 1.

    >>> count_runs(np.array([0, 1, 1, 0, 1], np.uint32))
    2
    """
    return int(np.count_nonzero(np.diff(trained, prepend=np.uint32(0)).astype(np.int32) == 1))


def skip_runs(ids: Tokens, trained: Tokens, count: int) -> tuple[Tokens, Tokens]:
    """The same without the first replies, which belong to the prompt.

    >>> skip_runs(np.arange(5), np.array([0, 1, 1, 0, 1], np.uint32), 1)[1].tolist()
    [0, 0, 0, 0, 1]
    """
    begins = np.diff(trained, prepend=np.uint32(0)).astype(np.int32) == 1
    return ids, np.where(np.cumsum(begins) > count, trained, 0).astype(np.uint32)
