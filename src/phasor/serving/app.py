"""The routes of the server, and what stands in front of them."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.config.schema import quote
from phasor.generation.engine import Engine
from phasor.generation.generated import Generated
from phasor.serving.answers import AnswerForm, ChatForm, CompletionForm, embedding_list, usage
from phasor.serving.embed import Embedder, why_no_embeddings
from phasor.serving.errors import FAILED, RequestError, failure
from phasor.serving.fields import ChatFields, CompletionFields, EmbeddingFields, SamplingFields, read_fields
from phasor.serving.listen import is_loopback
from phasor.serving.metrics import Metrics, RequestClock
from phasor.serving.requests import RequestReader
from phasor.serving.submission import Submission, refuse_if_full
from phasor.transformer import Transformer

PAGE = Path(__file__).parent / "page"
MOST_BYTES, BODY_SECONDS = 4 << 20, 60
OPEN = ("/", "/health")  # without a key
HAS_LEFT = "the client has left"


class Api:
    """The handlers of all routes, for one model: an engine for what decodes, an embedder for what is pooled."""

    def __init__(
        self,
        model: Transformer,
        engine: Engine | None,
        *,
        name: str,
        template: ChatTemplate | None = None,
        max_length: int | None = None,
    ) -> None:
        self.model, self.engine, self.name = model, engine, name
        self.reader = None if engine is None else RequestReader(model, template, max_length, engine.most_rows)
        self.embedder = Embedder(model) if why_no_embeddings(model) is None else None
        self.metrics = Metrics(engine)
        self.began = int(time.time())

    def routes(self) -> list[Route | Mount]:
        """All routes."""
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/embeddings": self.embeddings,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.models,
            "/health": self.health,
            "/metrics": self.prometheus,
            "/stats": self.stats,
            "/": self.page,
        }
        return [
            *(Route(path, self.count_answers(path, handler), methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]

    def count_answers(
        self, route: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler whose refusals are answers, and whose answers are counted."""

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except RequestError as error:
                response = error.response
            self.metrics.requests.labels(route, str(response.status_code)).inc()
            return response

        return handle

    async def completions(self, request: Request) -> Response:
        """/v1/completions"""
        reader, engine = self._decoder()
        fields = read_fields(CompletionFields, await read_body(request))
        refuse_if_full(engine)
        requests, copies = await anyio.to_thread.run_sync(reader.completions, fields)
        form = CompletionForm(*self._form("cmpl", fields))
        return await self._answer(request, fields, engine, requests, copies, form)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions"""
        reader, engine = self._decoder()
        fields = read_fields(ChatFields, await read_body(request))
        refuse_if_full(engine)
        requests, copies = await anyio.to_thread.run_sync(reader.reply, fields)
        form = ChatForm(*self._form("chatcmpl", fields))
        return await self._answer(request, fields, engine, requests, copies, form)

    def _decoder(self) -> tuple[RequestReader, Engine]:
        if self.reader is None or self.engine is None:
            raise RequestError("this model writes no text: it is for /v1/embeddings", 404)
        return self.reader, self.engine

    def _form(self, prefix: str, fields: SamplingFields) -> tuple[str, int, str, Any, bool, bool]:
        self._check_name(fields.model)
        ids = fields.return_token_ids or self.model.tokenizer is None
        logprobs = fields.top_log_probabilities is not None
        return f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self.name, self.model.tokenizer, logprobs, ids

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestError(
                f"there is no model {name!r} here: this server has {self.name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self,
        request: Request,
        fields: SamplingFields,
        engine: Engine,
        requests: Sequence[dict[str, Any]],
        copies: int,
        form: AnswerForm,
    ) -> Response:
        """Submit requests, and answer with all choices at once or with a stream of them."""
        clock = self.metrics.clock()
        submission = await Submission.submit(engine, requests, copies)
        if fields.stream:
            counts = fields.stream_options is not None and fields.stream_options.include_usage
            events = stream_events(submission, form, clock, counts)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            choices = await unless_left(request, collect(submission, clock))
        finally:
            submission.cancel()
        clock.end()
        return JSONResponse(form.whole(choices, usage(submission)))

    async def embeddings(self, request: Request) -> Response:
        """/v1/embeddings"""
        if self.embedder is None:
            raise RequestError(str(why_no_embeddings(self.model)), 404)
        fields = read_fields(EmbeddingFields, await read_body(request))
        self._check_name(fields.model)
        given = fields.input
        single = isinstance(given, str) or isinstance(given[0], int)
        try:
            ids = await anyio.to_thread.run_sync(self.embedder.read, [given] if single else list(given))
        except ValueError as error:
            raise RequestError(str(error), param="input") from None
        try:
            vectors = await anyio.to_thread.run_sync(self.embedder, ids)
        except Exception as error:  # such as too little memory
            raise failure(error) from None
        tokens = sum(map(len, ids))
        return JSONResponse(embedding_list(vectors, self.name, tokens, fields.encoding_format))

    async def models(self, request: Request) -> Response:
        """/v1/models, and the model by its name."""
        length = None if self.reader is None else self.reader.max_length
        own = {"id": self.name, "object": "model", "created": self.began, "owned_by": "phasor", "max_model_len": length}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [own]})
        try:
            self._check_name(request.path_params["name"])
        except RequestError as error:
            return error.response
        return JSONResponse(own)

    async def health(self, request: Request) -> Response:
        """Whether the server answers."""
        return JSONResponse({"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        """/metrics"""
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Response:
        """What the page shows."""
        found = {} if self.engine is None else vars(self.engine.stats())
        return JSONResponse({"model": self.name, "time": time.time(), **found})

    async def page(self, request: Request) -> Response:
        """The page that shows what the server does."""
        return FileResponse(PAGE / "index.html")


async def read_body(request: Request) -> bytes:
    """The body of a request; one that is too long is refused before it is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the body must be JSON, with the header Content-Type: application/json")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise RequestError(f"the body is encoded as {quote(encoding)}: send it plain, without Content-Encoding")
    too_long = RequestError(f"the body has more than {MOST_BYTES >> 20} MiB, the most that a request may have")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_long
    body = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_long
    except TimeoutError:
        raise RequestError(f"the body has not come within {BODY_SECONDS} seconds", 408) from None
    except ClientDisconnect:
        raise RequestError(HAS_LEFT, 499) from None
    return bytes(body)


async def collect(submission: Submission, clock: RequestClock) -> list[list[Generated]]:
    """The pieces of each choice, when all have ended."""
    choices: list[list[Generated]] = [[] for _ in range(len(submission.handles) * submission.copies)]
    async for index, piece in submission.pieces():
        clock.note(index)
        choices[index].append(piece)
    return choices


async def unless_left(request: Request, answer: Any) -> Any:
    """An answer, unless its client leaves before: then it is cancelled."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError(HAS_LEFT, 499)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def left(request: Request) -> None:
    """Wait until the client of a request has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream_events(
    submission: Submission, form: AnswerForm, clock: RequestClock, counts: bool
) -> AsyncIterator[str]:
    """The events of a stream; where its client leaves, its rows are freed."""
    offsets: dict[int, int] = {}
    try:
        async for index, piece in submission.pieces():
            clock.note(index)
            if index not in offsets and (first := form.first(index)) is not None:
                yield event(first)
            offset = offsets.setdefault(index, 0)
            offsets[index] += len(piece.text or "")
            yield event(form.chunk(index, piece, offset))
        if counts:
            yield event(form.last(usage(submission)))
        clock.end()
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield event(error.content)
    finally:
        submission.cancel()


def event(content: dict[str, Any]) -> str:
    """One event of a stream.

    >>> event({"id": 1})
    'data: {"id": 1}\\n\\n'
    """
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Gate:
    """Middleware that refuses requests without the key, and those that a page elsewhere makes a browser send.

    Where only this machine reaches the server, the host must be this machine: a page elsewhere can point its own name
    at it (DNS rebinding).
    """

    def __init__(self, app: Any, key: str | None, local: bool) -> None:
        self.app, self.key, self.local = app, None if key is None else key.encode(), local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (refused := self.refusal(scope["path"], Headers(scope=scope))) is not None:
            await refused.response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def refusal(self, path: str, headers: Headers) -> RequestError | None:
        """Why a request is refused; None where it is not."""
        host, origin = split_url(f"//{headers.get('host', '')}"), headers.get("origin")
        if self.local and not is_loopback(host.hostname or ""):
            return RequestError("the Host header does not name this machine, the only one that may ask", 403)
        if self.key is None and origin is not None and split_url(origin).netloc != host.netloc:
            return RequestError("requests from pages elsewhere are refused", 403)
        if self.key is None or path in OPEN or path.startswith("/page/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self.key):
            return None
        message = "an API key is needed: send the header Authorization: Bearer KEY"
        return RequestError(message, 401, kind="authentication_error", code="invalid_api_key")


def split_url(text: str) -> SplitResult:
    """The parts of a URL in lower case; all of them are empty where it is none.

    >>> split_url("HTTP://Localhost:80").netloc, split_url("http://[").netloc
    ('localhost:80', '')
    """
    try:
        return urlsplit(text.lower())
    except ValueError:
        return urlsplit("")


def build_app(api: Api, *, key: str | None = None, local: bool = True) -> Starlette:
    """The application: `key` has to come with every request, where there is one; `local` refuses other hosts."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 400
        reasons = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} takes another method"}
        return RequestError(reasons.get(status, "this request is refused"), status).response

    async def fail(request: Request, error: Exception) -> Response:
        message = f"the server failed with {type(error).__name__}; its terminal says where"
        return RequestError(message, 500, kind=FAILED).response

    return Starlette(
        routes=api.routes(),
        middleware=[Middleware(Gate, key, local)],
        exception_handlers={HTTPException: refuse, Exception: fail},
    )
