"""`serve`: a model behind HTTP, until a signal ends it."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.config import Extension
from phasor.config.schema import check_integer, plural
from phasor.generation.engine import Engine
from phasor.serving.app import Api, build_app
from phasor.serving.embed import why_no_embeddings
from phasor.serving.listen import address_of, is_loopback, listen
from phasor.transformer import Transformer

INTERRUPTED = 1  # the exit code where answers under way were given up
IDLE_SECONDS = 60  # that a connection may be open without a whole head of a request
MOST_CONNECTIONS = 4096  # where nobody says how many
BURST = 128  # connections that are accepted before those beyond the most are closed


class DrainingServer(uvicorn.Server):
    """A server that a first signal lets end what it is doing, for some seconds, and a second one ends at once.

    Up to `most` connections are open: where there are more, those that have waited longest for a request are closed.
    Where all have one, a further request is answered with 503.
    """

    def __init__(self, config: uvicorn.Config, seconds: int, most: int = MOST_CONNECTIONS) -> None:
        super().__init__(config)
        config.backlog, config.limit_concurrency = BURST, most + BURST + 1  # which counts that of the request too
        self.seconds, self.gave_up, self.most, self.makes_room = seconds, False, most, False
        self.idle_since: dict[Any, float] = {}  # connections, and when they were first seen without a request

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.protocol, self.config.http_protocol_class = self.config.http_protocol_class, self.accept  # type: ignore
        await super().startup(sockets)

    def accept(self, **options: Any) -> asyncio.Protocol:
        """The protocol of a new connection."""
        connection = self.protocol(**options)
        self.idle_since[connection] = time.monotonic()
        if len(self.server_state.connections) >= self.most and not self.makes_room:
            self.makes_room = True
            asyncio.get_running_loop().call_soon(self.make_room)
        return connection

    def make_room(self) -> None:
        """Close those idle connections that are older than the others, a few more than there are too many."""
        self.makes_room = False
        surplus = len(self.server_state.connections) - self.most + self.most // 8 + 1
        idle = [each for each in self.idle() if each.transport and not each.transport.get_write_buffer_size()]
        for connection in sorted(idle, key=lambda each: self.idle_since.get(each, math.inf))[:surplus]:
            connection.transport.close()

    def idle(self) -> list[Any]:
        """The connections without a request."""
        cycles = {connection: getattr(connection, "cycle", None) for connection in self.server_state.connections}
        return [connection for connection, cycle in cycles.items() if cycle is None or cycle.response_complete]

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # about once per second
            self.close_idle()
        return await super().on_tick(counter)

    def close_idle(self) -> None:
        """Close connections on which no request has come for too long: the system limits their number per process."""
        now = time.monotonic()
        self.idle_since = {connection: self.idle_since.get(connection, now) for connection in self.idle()}
        for connection, since in self.idle_since.items():
            if now - since >= IDLE_SECONDS and connection.transport is not None:
                connection.transport.close()  # after what a slow client has not read of its last answer

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(INTERRUPTED)  # threads may be in the middle of a step
        self.should_exit = True
        say(f"answers under way are finished within {plural(self.seconds, 'second')}; a second signal ends at once")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = asyncio.get_running_loop().call_later(self.seconds, self.close_connections)
        await super().shutdown(sockets)
        limit.cancel()

    def close_connections(self) -> None:
        """Close what is still open, so that clients that do not read their answers are no longer waited for."""
        connections = list(self.server_state.connections)
        self.gave_up = bool(connections)
        if connections:
            say(f"{plural(len(connections), 'connection')} closed before the end of the answer")
        for connection in connections:
            if connection.transport is not None:
                connection.transport.abort()


def say(message: str) -> None:
    print(f"phasor serve: {message}", file=sys.stderr, flush=True)


def serve(
    model: Transformer,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    template: ChatTemplate | None = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    max_waiting: int = 1024,
    max_connections: int | None = None,
    pages: int | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    deterministic: bool = False,
    extension: Extension | str | None = None,
    shutdown_timeout: int = 120,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests over HTTP until SIGTERM or Ctrl-C: completions, replies to conversations, embeddings.

    The interface is that of OpenAI's clients. `name` is what they call the model, by default its folder's. With an
    `api_key` every request has to bring it. `template` is the chat template, by default that of the model's folder.
    Prompt and new tokens may have `max_length` tokens, by default the model's. `max_rows` to `extension` are those of
    `Engine`, but for `max_connections`: where more are open, those without a request are closed, and requests beyond
    are answered with 503; by default 4,096, or three quarters of the files that the system lets the process open.
    Answers under way at a signal have `shutdown_timeout` seconds to end; where some are given up, the exit
    code is 1. `on_ready` is called with the address when the server listens.
    """
    check_integer("shutdown_timeout", shutdown_timeout, least=0)
    max_connections = default_connections() if max_connections is None else max_connections
    check_integer("max_connections", max_connections)
    if (model.decoder is None or not model.config.has_logits) and (why := why_no_embeddings(model)) is not None:
        raise ValueError(f"there is nothing to serve: this model writes no text, and {why}")
    template = ChatTemplate.of(model) if template is None else template
    engine = None
    if model.decoder is not None and model.config.has_logits:
        engine = Engine(
            model,
            max_rows=max_rows,
            max_waiting=max_waiting,
            pages=pages,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            deterministic=deterministic,
            extension=extension,
        )
    api = Api(model, engine, name=name or name_of(model), template=template, max_length=max_length)
    app = build_app(api, key=api_key, local=is_loopback(host))
    with listen(host, port) as server_socket, nullcontext() if engine is None else engine.start():
        if on_ready is not None:
            on_ready(address_of(host, server_socket.getsockname()[1]))
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        server = DrainingServer(config, shutdown_timeout, max_connections)
        server.run(sockets=[server_socket])
    if server.gave_up:
        sys.exit(INTERRUPTED)


def default_connections() -> int:
    """How many connections may be open: the system limits the open files of a process, and a connection is one."""
    try:
        import resource
    except ImportError:  # on Windows, where there is no such limit
        return MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else max(1, min(MOST_CONNECTIONS, files * 3 // 4))


def name_of(model: Transformer) -> str:
    """What clients call a model: the name of its folder, or that of the run which it is in."""
    if model.origin is None:
        return "phasor"
    folder = Path(model.origin.folder).resolve()
    return folder.parent.name if folder.name == "model" else folder.name
