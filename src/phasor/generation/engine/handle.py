"""A handle: one request that the engine works on, its results as they come, and how it is cancelled."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.engine.row import EngineRow
from phasor.generation.generated import Generated
from phasor.generation.request import GenerationRequest
from phasor.generation.sampling import GREEDY
from phasor.generation.text import TextTracker

if TYPE_CHECKING:
    from phasor.generation.engine.engine import Engine

# Given the prompt, the new tokens and the scores [vocab] of the next one: other scores.
LogitsProcessor = Callable[[list[int], list[int], Tensor], Tensor]


FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")


class CancelledError(RuntimeError):
    """The request was cancelled, or its engine closed."""


class Handle:
    """A request that `Engine.submit` accepted. Iterating gives its pieces as they come, `result` all of it at its end.

    A piece is a `Generated` with the tokens, the text and the log-probabilities that are new, the `index` of the
    continuation and, in its last piece, the `finish_reason`: "stop" or "length". With an `on_piece` pieces are handed
    to that alone. Where no thread runs the engine, iterating and `result` do.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        *,
        logits_processor: LogitsProcessor | None = None,
        top_logprobs: int = 0,
        on_piece: Callable[[Generated | None], None] | None = None,
    ) -> None:
        self.engine, self.request = engine, request
        self.logits_processor, self.top_logprobs, self.on_piece = logits_processor, top_logprobs, on_piece
        self.is_argmax_only = request.is_argmax_only and logits_processor is None
        self.filters = sampling_filters(request.options)
        self.tracker = TextTracker(request)
        self.rows = [EngineRow(self, i, state) for i, state in enumerate(request.new_rows())]
        self.rows[0].followers = self.rows[1:]
        self.salt = b""  # what keys and values depend on beside the tokens
        self.cached_tokens = 0  # of the prompt, that other requests had read
        self.submitted = time.monotonic()
        self.error: Exception | None = None
        self.cancelled = False
        # Whether the engine reads each token as it comes; otherwise whoever iterates does.
        self.needs_each_token = on_piece is not None or bool(self.tracker.decoders) or top_logprobs > 0
        self._pieces: deque[Generated] = deque()
        self._texts: list[list[str]] = [[] for _ in self.rows]
        self._changed = threading.Condition()
        self._waiting = self._ended = False

    @property
    def done(self) -> bool:
        """Whether nothing more comes: finished, failed or cancelled."""
        return self._ended

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt; of the source, for an encoder-decoder."""
        return len(self.request.prompts[0])

    @property
    def new_tokens(self) -> int:
        """The tokens that were generated so far, of all continuations."""
        return sum(len(row.state.new) for row in self.rows)

    def cancel(self) -> None:
        """Stop the request; its rows are free from the next step on."""
        self.cancelled = True
        self.engine.wake()

    def __iter__(self) -> Iterator[Generated]:
        """The pieces as they come."""
        while True:
            ended = self._ended  # read first: all that came before the end is there
            pieces = self._take_pieces()
            yield from pieces
            if ended and not pieces:
                self._raise()
                return
            if not pieces and not self.engine.advance():
                self._wait_for_more()

    def _take_pieces(self) -> list[Generated]:
        with self._changed:
            if not self.needs_each_token:
                return self.read_pieces()
            pieces = list(self._pieces)
            self._pieces.clear()
            return pieces

    def _wait_for_more(self) -> None:
        with self._changed:
            self._waiting = True  # before the look at what has come, so that nothing comes between unnoticed
            come = self._pieces if self.needs_each_token else any(map(has_unread, self.rows))
            if not come and not self._ended:
                self._changed.wait(timeout=1.0)
            self._waiting = False

    def read_pieces(self) -> list[Generated]:
        """What is new since the last call, a piece for each continuation that has something new."""
        states = [row.state for row in self.rows]
        done, first = [state.done for state in states], [state.num_read for state in states]
        pieces = []
        for row, was_done, start, text in zip(self.rows, done, first, self.tracker.read(states), strict=True):
            state = row.state
            if state.num_read == start:
                continue
            reason = None
            if was_done or (self.needs_each_token and state.done):  # which reading may find out: a stop text
                reason = self.finish_reason(row)
                text += self.tracker.decoders[row.index].flush() if self.tracker.decoders else ""
            read = slice(start, state.num_read)
            new, values = state.new[read], state.log_probabilities[read]
            own = None if self.request.tokenizer is None else text
            pieces.append(Generated(new, values, own, None, row.index, reason, row.tops[start:]))
        return pieces

    def result(self, timeout: float | None = None) -> Any:
        """The whole of it as a `Generated`; a list of them where `num_return_sequences` is above 1.

        A request that failed raises its error, one that was cancelled a `CancelledError`, and one that takes longer
        than `timeout` seconds a `TimeoutError`, and goes on.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the request takes longer than {timeout} seconds")
            if not self.engine.advance():
                with self._changed:
                    if not self._ended:
                        self._changed.wait(timeout=1.0 if left is None else min(left, 1.0))
        self._raise()
        whole = [self._join(index) for index in range(len(self.rows))]
        return whole[0] if self.request.samples_per_prompt == 1 else whole

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
        if self.cancelled:
            raise CancelledError("the request was cancelled")

    def _join(self, index: int) -> Generated:
        row = self.rows[index]
        text = None if self.request.tokenizer is None else "".join(self._texts[index])
        tokens, values, reason = row.state.new, row.state.log_probabilities, self.finish_reason(row)
        return Generated(tokens, values, text, None, index, reason, row.tops)

    def finish_reason(self, row: EngineRow) -> str:
        """Where a row that is done has ended: at a stop, or at its last token."""
        decoders, new = self.tracker.decoders, row.state.new
        stopped = new[-1] in self.request.stop or (bool(decoders) and decoders[row.index].stopped)
        return "stop" if stopped else "length"

    def deliver(self, piece: Generated) -> None:
        """Hand a piece to whoever waits for it."""
        if piece.text:
            self._texts[piece.index].append(piece.text)
        if self.on_piece is not None:
            self.on_piece(piece)
            return
        self._pieces.append(piece)

    def wake_reader(self) -> None:
        """Let whoever waits for a piece look again."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing more comes."""
        with self._changed:
            if self._ended:
                return
            self.error, self._ended = error, True
            self._changed.notify_all()
        if self.on_piece is not None:
            with suppress(Exception):  # of the caller, for whom nothing more is done
                self.on_piece(None)


def has_unread(row: EngineRow) -> bool:
    """Whether nobody has read the last token of a row."""
    return row.state.num_read < len(row.state.new)


def sampling_filters(options: GenerationConfig) -> GenerationConfig:
    """The options that decide how a token is drawn from scores: requests that agree in them are drawn together."""
    return GREEDY.replace(**{name: getattr(options, name) for name in FILTERS}) if options.samples else GREEDY
