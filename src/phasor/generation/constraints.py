"""Which tokens may come next: those that are forced, and those that are banned, however likely the model finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Constraints:
    """The constraints of a request; each has the meaning it has in `transformers`.

    >>> rules = Constraints(banned=frozenset({0}), no_repeat_ngram_size=2, stop=frozenset({5}), min_new_tokens=3)
    >>> sorted(rules.banned_after([1, 2], [3, 1]))
    [0, 2, 5]
    """

    forced_first: int | None = None  # the first token of an empty text, or after a single token
    forced_last: int | None = None  # the token with which max_new_tokens are reached
    max_new_tokens: int | None = None
    banned: frozenset[int] = frozenset()  # always
    banned_first: frozenset[int] = frozenset()  # as the first new token that is not forced
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # of several tokens: the last is banned after the others
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0  # before these, no stop token
    stop: frozenset[int] = frozenset()

    @cached_property
    def any(self) -> bool:
        """Whether anything is forced or banned."""
        return self.depends_on_text or bool(self.banned)

    @cached_property
    def depends_on_text(self) -> bool:
        """Whether there is more than tokens that are always banned."""
        forced = self.forced_first is not None or self.forced_last is not None
        sizes = self.no_repeat_ngram_size or (self.min_new_tokens and self.stop)
        return forced or bool(self.banned_first or self.banned_sequences or sizes)

    @cached_property
    def num_deciding_tokens(self) -> int | None:
        """How many of the last new tokens decide what may come next; None where all of them do."""
        if self.no_repeat_ngram_size:
            return None
        return max(2, self.min_new_tokens, *map(len, self.banned_sequences))

    def forced_token(self, prompt: Sequence[int], new: Sequence[int]) -> int | None:
        """The token that has to come next, where one does."""
        if self.forced_last is not None and len(new) + 1 == self.max_new_tokens:
            return self.forced_last
        return self.forced_first if len(prompt) + len(new) == 1 else None

    def banned_after(self, prompt: Sequence[int], new: Sequence[int]) -> set[int]:
        """The tokens that cannot come next."""
        banned = set(self.banned)
        first = 1 if self.forced_first is not None and len(prompt) == 1 else 0
        if len(new) == first:
            banned |= self.banned_first
        if len(new) < self.min_new_tokens:
            banned |= self.stop
        if not (self.banned_sequences or self.no_repeat_ngram_size):
            return banned
        text = [*prompt, *new]
        banned |= {words[-1] for words in self.banned_sequences if text[1 - len(words) :] == list(words[:-1])}
        return banned | repeated_ngrams(text, self.no_repeat_ngram_size)

    def rule(self, prompt: Sequence[int], new: Sequence[int]) -> tuple[int | None, frozenset[int]]:
        """What holds for the next token: the one that is forced, where one is, or else those that are banned."""
        forced = self.forced_token(prompt, new)
        return forced, frozenset() if forced is not None else frozenset(self.banned_after(prompt, new))

    def mask(self, scores: Tensor) -> Tensor:
        """Scores `[..., vocab]` without the tokens that are always banned."""
        return fill(scores, self.banned)

    def apply(self, scores: Tensor, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
        """Scores `[..., vocab]` without the tokens that cannot come next."""
        if not self.any:
            return scores
        forced, banned = self.rule(prompt, new)
        return fill(scores, banned) if forced is None else only_token(forced, scores)


def repeated_ngrams(text: list[int], size: int) -> set[int]:
    """The tokens that would complete an n-gram of this size that the text has already.

    >>> repeated_ngrams([1, 2, 3, 1, 2], 3)
    {3}
    """
    if size < 1 or len(text) + 1 < size:
        return set()
    tail = text[len(text) - size + 1 :]
    ends = range(size - 1, len(text))
    return {text[end] for end in ends if text[end - size + 1 : end] == tail}


def fill(scores: Tensor, tokens: frozenset[int] | set[int]) -> Tensor:
    """Scores `[..., vocab]` with some tokens made impossible."""
    if not tokens:
        return scores
    return scores.index_fill(-1, torch.tensor(sorted(tokens), device=scores.device), MINUS_INFINITY)


def only_token(token: int, like: Tensor) -> Tensor:
    """Scores that allow one token: its log-probability is 0."""
    scores = torch.full_like(like, MINUS_INFINITY)
    scores[..., token] = 0.0
    return scores
