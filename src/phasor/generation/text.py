"""Text of generated tokens: decoded once, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.generation.request import GenerationRequest, SequenceState

REPLACEMENT = "\ufffd"  # what a tokenizer decodes bytes to that are not a character, or not yet
CONTEXT_TOKENS = 8  # tokens of the prompt that the first new ones are decoded with


class TextDecoder:
    """Decodes tokens to text as they arrive, and holds back text that further tokens could still change.

    A character may take several tokens, and a stop text may have begun; neither is returned in part. Tokens are
    decoded together with the few before them, on which a space may depend, so that a token costs the same however
    long the text is.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.before = list(context[-CONTEXT_TOKENS:])  # tokens whose text is final
        self.pending: list[int] = []  # tokens whose text may still change
        self.held = ""  # text in which a stop text may have begun
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is final now and was not before."""
        if self.stopped:
            return ""
        self.pending.append(token)
        new = self._pending_text()
        text = self.held + new
        ends = [text.find(stop) for stop in self.stops if stop in text]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        if new == "" or new.endswith(REPLACEMENT):
            return ""
        self.before, self.pending = self.pending, []
        final = len(text) - max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[final:]
        return text[:final]

    def flush(self) -> str:
        """The text that was held back, when no more tokens come."""
        return "" if self.stopped else self.held + self._pending_text()

    def _pending_text(self) -> str:
        with tokenizer_errors("the tokenizer cannot decode what was generated"):
            known = self.tokenizer.decode(self.before)
            return self.tokenizer.decode(self.before + self.pending)[len(known) :]


class TextTracker:
    """Reads the new tokens of a request's rows: decodes them, and ends a row at a stop text.

    For prompts of token ids there is no text, and all of it is empty.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.stop = request.stop
        rows = range(0 if request.tokenizer is None else len(request.prompts))
        self.decoders = [text_decoder(request, row) for row in rows]

    def read(self, rows: list[SequenceState]) -> list[str]:
        """Read the tokens that are new since the last call; their text, for each row."""
        texts = []
        for i, row in enumerate(rows):
            text = ""
            while row.num_read < len(row.new):
                token = row.new[row.num_read]
                row.num_read += 1
                if self.decoders and token not in self.stop:
                    text += self.decoders[i].add(token)
                    if self.decoders[i].stopped:
                        row.done = True
                        del row.new[row.num_read :], row.log_probabilities[row.num_read :]
            texts.append(text)
        return texts

    def flush(self) -> list[str]:
        """The text that was held back, for each row, when no more tokens come."""
        return [decoder.flush() for decoder in self.decoders]


def text_decoder(request: GenerationRequest, row: int) -> TextDecoder:
    """The decoder for the new tokens of a prompt; an encoder-decoder's target does not continue its source."""
    context = [] if request.is_encoder_decoder else request.prompts[row]
    return TextDecoder(request.tokenizer, request.stop_texts, context)


def decode_text(request: GenerationRequest, row: int, tokens: Sequence[int]) -> str | None:
    """The text of all new tokens of a prompt, without the stop token at their end; None for prompts of token ids."""
    if request.tokenizer is None:
        return None
    decoder = text_decoder(request, row)
    ended = bool(tokens) and tokens[-1] in request.stop
    return "".join(map(decoder.add, tokens[:-1] if ended else tokens)) + decoder.flush()


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop text.

    >>> overlap("see EN", "END")
    2
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
