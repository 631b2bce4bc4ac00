"""Mixtures: every source once or more in an epoch, so often that its share of the tokens is that of its weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.config.mixture import MixtureSource
from phasor.data.order import Permutation
from phasor.data.token_files import TokenStore

MOST_REPEATS = 1000


class SourceShare(NamedTuple):
    """A source, what it holds, and what of it an epoch has."""

    path: str
    examples: int
    tokens: int
    epoch_examples: int
    epoch_tokens: int


def mix(
    store: TokenStore, lengths: NDArray[np.int64], counts: Sequence[int], sources: Sequence[MixtureSource]
) -> tuple[TokenStore, list[SourceShare]]:
    """The examples of an epoch, from a store that holds those of one source after the other; and what is of which.

    `lengths` are the tokens of each example, and `counts` the examples of each source.

    The source with the most tokens for its weight comes once, whole. Another comes whole as often as its weight asks
    for, and of what is left of that number a part of it, always the same, comes once more.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from phasor.data.token_files import TokenWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TokenWriter(Path(folder), "train", sides=1, vocab_size=300) as writer:
    ...         for tokens in ([5] * 10, [6] * 10, [7] * 4):
    ...             writer.add((np.array(tokens),), text_bytes=0)
    ...     store = TokenStore(Path(folder), "train", writer.describe())
    >>> mixed, shares = mix(store, store.lengths[:, 0], [2, 1], [MixtureSource(path="a"), MixtureSource(path="b")])
    >>> len(mixed), [share.epoch_tokens for share in shares]
    (7, [20, 20])
    """
    ends = np.cumsum([0, *counts])
    tokens = [int(lengths[a:b].sum()) for a, b in itertools.pairwise(ends)]
    for source, count in zip(sources, tokens, strict=True):
        if count == 0:
            raise ValueError(f"data.mixture: nothing of {source.path} is left to train on")
    rates = [source.weight / count for source, count in zip(sources, tokens, strict=True)]
    chosen: list[NDArray[np.int64]] = []
    for i, source in enumerate(sources):
        repeats = rates[i] / min(rates)
        if repeats > MOST_REPEATS:
            raise ValueError(
                f"data.mixture: {source.path} has {tokens[i]:,} tokens, and its weight asks for each of them "
                f"{repeats:,.0f} times in an epoch, more than {MOST_REPEATS:,}: give it a lower weight"
            )
        chosen.append(ends[i] + repeat_examples(counts[i], repeats, f"source {i} of a mixture"))
    shares = [
        SourceShare(source.path, counts[i], tokens[i], len(chosen[i]), int(lengths[chosen[i]].sum()))
        for i, source in enumerate(sources)
    ]
    return store.select(np.concatenate(chosen)), shares


def repeat_examples(count: int, repeats: float, key: str) -> NDArray[np.int64]:
    """The integers below `count`, each `repeats` times on average: as often as each other, or once more.

    >>> np.bincount(repeat_examples(4, 2.5, "a")).tolist()
    [3, 3, 2, 2]
    """
    whole = int(repeats)
    more = Permutation(count, key).at(np.arange(round((repeats - whole) * count)))
    return np.concatenate([np.tile(np.arange(count), whole), np.sort(more)])


def describe_mixture(shares: Sequence[SourceShare]) -> list[str]:
    """A line for each source.

    >>> describe_mixture([SourceShare("a.jsonl", 2, 20, 5, 50), SourceShare("b", 5, 150, 5, 150)])[0]
    'a.jsonl: 2 examples, 20 tokens; 2.50 times in an epoch, 25.0 % of its tokens'
    """
    total = sum(share.epoch_tokens for share in shares)
    return [
        f"{one.path}: {one.examples:,} examples, {one.tokens:,} tokens; {one.epoch_examples / one.examples:.2f} times "
        f"in an epoch, {one.epoch_tokens / total:.1%} of its tokens".replace("%", " %")
        for one in shares
    ]
