"""Text in and out: a folder's tokenizer, and pieces of text as tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HALF = "\ufffd"  # what a decoder writes for bytes that are not a character, or not yet
REACH = 8  # tokens of the prompt that the first new ones are read with


class Pieces:
    """Turns tokens into text as they arrive, held back while more of them could still change it.

    A character may take several tokens, and a stop text may have begun; neither is given out half. Tokens are
    read together with the few before them, on which a space may depend, so that a token costs the same however
    long the text is.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.before = list(context[-REACH:])  # tokens whose text is known
        self.unread: list[int] = []  # tokens whose text more of them may change
        self.held = ""  # text in which a stop text may have begun
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        self.unread.append(token)
        new = self._unread_text()
        text = self.held + new
        ends = [text.find(stop) for stop in self.stops if stop in text]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        if new == "" or new.endswith(HALF):
            return ""
        self.before, self.unread = self.unread, []
        certain = len(text) - max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self.held + self._unread_text()

    def _unread_text(self) -> str:
        known = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + self.unread)[len(known) :]


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop text.

    >>> overlap("see EN", "END")
    2
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
