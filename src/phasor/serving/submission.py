"""Requests of one HTTP call on the engine, as pieces that an event loop waits for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Self

import anyio.to_thread

from phasor.generation.engine import Engine, Handle, QueueFullError
from phasor.generation.generated import Generated
from phasor.serving.errors import RequestError, failure

RETRY_SECONDS = 1
# Options of `generate` by the names that they have in requests.
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class Submission:
    """What one HTTP call has submitted; each request has `copies` choices, which are counted on from it to the next."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.handles: list[Handle] = []
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Generated | None]] = asyncio.Queue()

    @classmethod
    async def submit(cls, engine: Engine, requests: Sequence[dict[str, Any]], copies: int) -> Self:
        """Submit requests, the arguments of `Engine.submit`: all of them, or none where one is refused."""
        submission = cls(copies)
        try:
            for index, request in enumerate(requests):
                submit = partial(engine.submit, **request, on_piece=partial(submission._receive, index))
                submission.handles.append(await anyio.to_thread.run_sync(submit))
        except BaseException as error:
            submission.cancel()
            if isinstance(error, QueueFullError):
                raise try_again(error) from None
            if isinstance(error, ValueError):
                message = name_fields(str(error))
                field = re.match(r"(\w+) must |(?:the|a) (prompt)\b|a (stop) text|unknown (extension)\b", message)
                raise RequestError(message, param=field and next(filter(None, field.groups()))) from None
            raise
        return submission

    def _receive(self, index: int, piece: Generated | None) -> None:
        """Take a piece in the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Generated]]:
        """The pieces of all choices as they come, each with the number of its choice."""
        running = len(self.handles)
        while running:
            index, piece = await self._queue.get()
            if piece is not None:
                yield index * self.copies + piece.index, piece
                continue
            running -= 1
            if (error := self.handles[index].error) is not None:
                raise failure(error)
            if self.handles[index].cancelled:
                raise failure(RuntimeError("the server is ending"))

    def cancel(self) -> None:
        """Free the rows of requests that have not ended."""
        for handle in self.handles:
            if not handle.done:
                handle.cancel()

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(handle.prompt_tokens for handle in self.handles)

    @property
    def cached_tokens(self) -> int:
        """Those of them that other requests had read."""
        return sum(handle.cached_tokens for handle in self.handles)

    @property
    def new_tokens(self) -> int:
        """The tokens of all choices so far."""
        return sum(handle.new_tokens for handle in self.handles)


def refuse_if_full(engine: Engine) -> None:
    """Refuse a request that would find no place, before its prompt is read."""
    try:
        engine.check_queue()
    except QueueFullError as error:
        raise try_again(error) from None


def try_again(error: QueueFullError) -> RequestError:
    """What is said where the queue is full."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return RequestError(str(error), 429, kind="rate_limit_error", code="queue_full", headers=headers)


def name_fields(message: str) -> str:
    """A sentence about options, with the names of fields.

    >>> name_fields("max_new_tokens must be at least 1, not 0")
    'max_tokens must be at least 1, not 0'
    """
    for option, field in NAMES.items():
        message = message.replace(option, field)
    return message
