"""Text in and out: a folder's tokenizer, and pieces of text as tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pieces:
    """Turns tokens into text as they arrive, held back while more of them could still change it.

    A character may take several tokens, and a stop text may have begun; neither is given out half.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, [s for s in stops if s]
        self.tokens: list[int] = []
        self.given = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens)
        ends = [text.find(stop) for stop in self.stops if stop in text]
        if ends:
            self.stopped = True
            return self._give(text[: min(ends)])
        while text.endswith("\ufffd"):
            text = text[:-1]
        held = max((overlap(text, stop) for stop in self.stops), default=0)
        return self._give(text[: len(text) - held])

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self._give(self.tokenizer.decode(self.tokens))

    def _give(self, text: str) -> str:
        new = text[len(self.given) :] if text.startswith(self.given) else ""
        self.given += new
        return new


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop text.

    >>> overlap("see EN", "END")
    2
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
