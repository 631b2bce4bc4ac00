"""Positions given by the data, for documents in rows of a batch: skipped, randomized or coupled.

They are numpy arrays of the shape of the tokens, a function of the seed alone, and go to a model as `Batch.positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from phasor.config.recipe import DataConfig
from phasor.data.order import IntArray
from phasor.data.token_files import TokenStore

POSITIONS = 1  # what tells the draws of positions from those of masks
FIRST = 1  # the lowest position of coupled text; 0 is that of special tokens


class Spans(NamedTuple):
    """The documents of rows, end to end: where each starts, its size, and every token's offset in its own."""

    starts: IntArray
    sizes: IntArray
    offsets: IntArray

    @classmethod
    def of(cls, documents: NDArray[Any]) -> Spans:
        """The spans of equal ids within rows `[B, T]`."""
        begins = np.ones(documents.shape, bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = np.flatnonzero(begins)
        sizes = np.diff(starts, append=documents.size)
        return cls(starts, sizes, np.arange(documents.size) - np.repeat(starts, sizes))


def skipped_positions(documents: NDArray[Any], to: int, seed: Sequence[int]) -> IntArray:
    """Positions below `to` for documents in rows `[B, T]`, each in two parts, the second moved at random (PoSE).

    Within a document positions increase, and the first part counts from 0. The cut and the distance are uniform: of the
    latter, from none to as far as the last token reaches `to - 1`.

    >>> skipped_positions(np.array([[0, 0, 0, 0, 1, 1]]), 100, [0, 0]).tolist()
    [[0, 1, 2, 46, 0, 3]]
    """
    spans = Spans.of(documents)
    draw = np.random.default_rng([*seed, POSITIONS])
    cuts = draw.integers(1, np.maximum(spans.sizes, 2))
    moves = draw.integers(0, to - spans.sizes, endpoint=True)
    moved = np.repeat(moves, spans.sizes) * (spans.offsets >= np.repeat(cuts, spans.sizes))
    return (spans.offsets + moved).reshape(documents.shape)


def randomized_positions(documents: NDArray[Any], to: int, seed: Sequence[int]) -> IntArray:
    """For each document in rows `[B, T]` as many different positions below `to` as it has tokens, sorted.

    Every set of positions is as likely (Ruoss et al., 2023).

    >>> randomized_positions(np.array([[0, 0, 0, 0, 1, 1]]), 100, [0, 0]).tolist()
    [[2, 39, 44, 86, 57, 75]]
    """
    draw = np.random.default_rng([*seed, POSITIONS])
    own = [np.sort(draw.choice(to, size, replace=False, shuffle=False)) for size in Spans.of(documents).sizes]
    return np.concatenate(own).astype(np.int64).reshape(documents.shape)


class DigitTokens(NamedTuple):
    """The token ids that coupled positions look at: digits, the one before a result, and special ones."""

    digits: tuple[int, ...]
    equals: int
    special: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> DigitTokens:
        """Those of a tokenizer that has one token for every digit.

        >>> from phasor.data.tokenizers import byte_tokenizer
        >>> tokens = DigitTokens.of(byte_tokenizer())
        >>> tokens.digits[:3], tokens.equals, tokens.special
        ((53, 54, 55), 66, (0, 1, 2, 3, 4))
        """
        vocabulary = tokenizer.get_vocab()
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        several = [t for t, i in vocabulary.items() if len(t) > 1 and i not in special and any(map(is_digit, t))]
        if several:
            raise ValueError(
                f"coupled positions need one token per digit, and this tokenizer has {min(several)!r}: "
                "set data.tokenizer to 'bytes'"
            )
        missing = [letter for letter in "0123456789=" if letter not in vocabulary]
        if missing:
            raise ValueError(f"coupled positions need a token for {missing[0]!r}, which this tokenizer does not have")
        return cls(tuple(vocabulary[d] for d in "0123456789"), vocabulary["="], tuple(sorted(special)))


def is_digit(letter: str) -> bool:
    return "0" <= letter <= "9"


def coupled_positions(
    tokens: NDArray[Any],
    digit_tokens: DigitTokens,
    documents: NDArray[Any] | None = None,
    to: int | None = None,
    seed: Sequence[int] | None = None,
) -> IntArray:
    """Positions of arithmetic in rows `[B, T]`: digits of equal significance share one (position coupling).

    A number is a run of digits, written from its highest digit on; right after the equals token it is a result,
    written from its lowest digit on. In a document that starts at `s`, the digit of `10^k` has the position
    `s + 1 + k`, a sign after a number that is no result the position above its highest digit, every other token `s`,
    and special tokens 0. So each digit of a result is at the position that follows the last one, as generation with a
    cache counts, and a result ends where a sign shows that the numbers do. With a `seed`, `s` is drawn for each
    document from those that keep all positions below `to`, so that none of these is rare; else it is 1.

    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> tokens = np.array([tokenizer.encode("653+49=2070").ids])
    >>> coupled_positions(tokens, DigitTokens.of(tokenizer)).tolist()
    [[0, 4, 3, 2, 5, 3, 2, 1, 2, 3, 4, 5]]
    """
    documents = np.zeros(tokens.shape, np.int64) if documents is None else documents
    spans, flat = Spans.of(documents), tokens.reshape(-1)
    digit = np.isin(flat, digit_tokens.digits)
    # A run is a number, or one token of another kind.
    begins = ~digit
    begins[spans.starts] = True
    begins[1:] |= ~digit[:-1]
    first = np.flatnonzero(begins)
    sizes = np.diff(first, append=flat.size)
    run = np.repeat(np.arange(first.size), sizes)
    index = np.arange(flat.size) - first[run]
    is_result = (first > 0) & (flat[first - 1] == digit_tokens.equals) & (spans.offsets[first] > 0)
    level = np.where(digit, 1 + np.where(is_result[run], index, sizes[run] - 1 - index), 0)
    is_sign = ~digit & (spans.offsets > 0) & np.roll(digit & ~is_result[run], 1) & (flat != digit_tokens.equals)
    level[is_sign] = 1 + sizes[run[is_sign] - 1]
    highest = np.maximum.reduceat(level, spans.starts)
    if to is not None and FIRST + highest.max() >= to:
        raise ValueError(
            f"a number of {level[digit].max()} digits reaches the coupled position {FIRST + highest.max()}, "
            f"and positions are to stay below {to} (data.positions_to)"
        )
    offset = np.full(spans.starts.shape, FIRST)
    if seed is not None and to is not None:
        # Draws beyond an end count for it: else few documents would reach the first and the last positions.
        drawn = np.random.default_rng([*seed, POSITIONS]).integers(FIRST - highest, to)
        offset = drawn.clip(FIRST, to - highest - 1)
    positions = np.repeat(offset, spans.sizes) + level
    return np.where(np.isin(flat, digit_tokens.special), 0, positions).reshape(tokens.shape)


# Positions that depend on where documents are, and on nothing that they say.
BY_DOCUMENT: dict[str, Callable[[NDArray[Any], int, Sequence[int]], IntArray]] = {
    "skipped": skipped_positions,
    "randomized": randomized_positions,
}


@dataclass(frozen=True)
class GivenPositions:
    """How the rows of a store get the positions that `data.positions` asks for.

    `training` draws the offsets of coupled positions; validation has the lowest ones. Skipped positions are for
    training alone, randomized ones are the same in both.
    """

    kind: str
    to: int | None
    seed: int
    digit_tokens: DigitTokens | None = None
    training: bool = True

    @classmethod
    def of(cls, data: DataConfig, seed: int, tokenizer: Any = None, training: bool = True) -> Self | None:
        """Those of a recipe's data; None for ordinary ones. Coupled ones look at the tokenizer's digits.

        >>> GivenPositions.of(DataConfig(positions="skipped", positions_to=512), seed=0, training=False) is None
        True
        """
        if data.positions == "ordinary" or (data.positions == "skipped" and not training):
            return None
        if data.positions == "coupled" and tokenizer is None:
            raise ValueError("coupled positions need the tokenizer, whose digits they look at")
        digit_tokens = DigitTokens.of(tokenizer) if data.positions == "coupled" else None
        return cls(data.positions, data.positions_to, seed, digit_tokens, training)

    @property
    def length(self) -> int | None:
        """The length that frequencies are planned for; None where it is that of the text."""
        return self.to if self.kind in BY_DOCUMENT else None

    def draw(
        self, documents: NDArray[Any], store: TokenStore, real: NDArray[np.bool_], address: Any, step: int
    ) -> IntArray:
        """Positions of the rows of one step: their documents `[B, T]`, and where in a store their real tokens are."""
        if self.digit_tokens is None:
            assert self.to is not None
            return BY_DOCUMENT[self.kind](documents, self.to, [self.seed, step])
        # A row may end within a number: its digits are counted in the whole document.
        ends = store.every
        examples, which = np.unique(np.searchsorted(ends, address, side="right") - 1, return_inverse=True)
        sizes = ends[examples + 1] - ends[examples]
        starts = np.cumsum(sizes) - sizes
        every = np.repeat(ends[examples] - starts, sizes) + np.arange(sizes.sum())
        whole = coupled_positions(
            np.asarray(store.tokens[0][every])[None],
            self.digit_tokens,
            np.repeat(np.arange(examples.size), sizes)[None],
            self.to,
            [self.seed, step] if self.training else None,
        )
        positions = np.zeros(documents.shape, np.int64)
        positions[real] = whole[0, starts[which] + address - ends[examples][which]]
        return positions
