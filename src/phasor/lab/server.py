"""The server of the lab: the files of the page, and the endpoints of the table with their limits."""

from __future__ import annotations

import importlib
import json
import math
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phasor.config.schema import shorten, to_plain, unique_keys
from phasor.lab.endpoints import ENDPOINTS, MAX_ELEMENTS, Endpoint, Matrix
from phasor.lab.figures import FIGURES
from phasor.lab.folders import Folders
from phasor.lab.guard import HEADERS, LOCAL, Guard
from phasor.lab.openapi import openapi
from phasor.lab.schemes import describe_schemes
from phasor.lab.views import import_views

PAGE = Path(__file__).parent / "page"
VIEWS = ("extension", "phasors", "encodings", "order", "precision", "parts", "runs", "sources")

MAX_BODY = 2 << 20  # bytes; a config.json of 1 MB, escaped in JSON
COMPUTING = 2  # at once
WAITING = 32  # more are refused

MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class ComputeQueue:
    """Runs functions in threads: two at once, 32 waiting for their turn, no more."""

    def __init__(self) -> None:
        self.turns = anyio.Semaphore(COMPUTING)
        self.threads = anyio.CapacityLimiter(COMPUTING)
        self.waiting = 0

    async def run(self, request: Request, function: Any, *arguments: Any) -> Response:
        """The response that a function returns when it is its turn, or 503 where too many wait already."""
        if self.waiting >= WAITING:
            return mistake("too many computations are waiting: try again in a moment", 503, retry=1)
        self.waiting += 1
        try:
            await self.turns.acquire()
        finally:
            self.waiting -= 1
        try:
            if await request.is_disconnected():
                return Response(status_code=499)  # the page has asked for something newer
            return await anyio.to_thread.run_sync(function, *arguments, limiter=self.threads)
        finally:
            self.turns.release()


def build_app(
    folders: Sequence[str | Path] = (),
    *,
    hosts: Iterable[str] = LOCAL,
    numeric_hosts: bool = False,
    version: str = "",
) -> Starlette:
    """The application: `hosts` are the names by which it may be asked for, with `numeric_hosts` any address too.

    >>> [route.path for route in build_app().routes][:2]
    ['/', '/openapi.json']
    """
    import_views()
    shared = Folders(folders)
    files = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in MEDIA_TYPES}
    document = openapi(ENDPOINTS.values(), version)
    queue = ComputeQueue()

    async def page(request: Request) -> Response:
        if request.url.path in ENDPOINTS:
            raise HTTPException(405, "this endpoint answers POST", {"Allow": "POST"})
        path = files.get(request.path_params.get("path", "index.html"))
        if path is None:
            return mistake("there is no such file", 404)
        return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])

    async def about(request: Request) -> Response:
        views = [view for view in VIEWS if f"js/views/{view}.js" in files]
        return JSONResponse(
            {
                "version": document["info"]["version"],
                "views": views,
                "folders": shared.names,
                "schemes": describe_schemes(),
            }
        )

    async def figures(request: Request) -> Response:
        return JSONResponse([asdict(figure) for figure in FIGURES])

    async def describe(request: Request) -> Response:
        return JSONResponse(document)

    async def compute(request: Request) -> Response:
        endpoint = ENDPOINTS.get(request.url.path)
        if endpoint is None:
            return mistake("there is no such endpoint; /openapi.json lists them", 404)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return mistake("the body must be application/json", 415)
        try:
            body = await read_body(request)
        except ValueError as error:
            return mistake(str(error), 413)
        except ClientDisconnect:
            return Response(status_code=499)
        return await queue.run(request, answer, endpoint, body, shared)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/openapi.json", describe),
            Route("/api/about", about),
            Route("/api/figures", figures),
            Route("/api/{view}/{name}", compute, methods=["POST"]),
            Route("/{path:path}", page),
        ],
        middleware=[Middleware(Guard, hosts=hosts, numeric=numeric_hosts)],
        exception_handlers={HTTPException: refuse, Exception: fail},
        lifespan=warm_up,
    )


@asynccontextmanager
async def warm_up(app: Starlette) -> AsyncIterator[None]:
    """Import torch in the background, once the page can be served."""
    threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
    yield


async def read_body(request: Request) -> bytes:
    """The body of a request, or a ValueError where it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ValueError(f"the request has more than {MAX_BODY >> 20} MiB")
    return bytes(body)


def answer(endpoint: Endpoint, body: bytes, folders: Folders) -> Response:
    """The response of an endpoint to the body of a request."""
    try:
        result = endpoint.answer(parse(body), folders)
        if isinstance(result, Matrix) and math.prod(result.shape) > MAX_ELEMENTS:
            raise ValueError(f"this matrix has {math.prod(result.shape):,} elements; at most {MAX_ELEMENTS:,} are sent")
    except ValueError as error:
        return mistake(str(error), field=getattr(error, "field", None))
    if isinstance(result, Matrix):
        headers = {"X-Shape": ",".join(map(str, result.shape)), "X-Notes": json.dumps(finite(dict(result.notes)))}
        return Response(result.data, media_type="application/octet-stream", headers=headers)
    return Response(encode(result), media_type="application/json")


def parse(body: bytes) -> Any:
    """The JSON of a body; NaN, infinities and keys that stand twice are refused."""
    try:
        return json.loads(body, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {shorten(str(error), 300)}") from None


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def encode(result: Any) -> bytes:
    """JSON, in which numbers that are not finite are null.

    >>> encode({"loss": float("nan")})
    b'{"loss": null}'
    """
    result = to_plain(result)
    try:
        return json.dumps(result, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    except ValueError:
        return json.dumps(finite(result), ensure_ascii=False).encode("utf-8", "replace")


def finite(value: Any) -> Any:
    """Plain data with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mistake(sentence: str, status: int = 400, field: str | None = None, retry: int | None = None) -> Response:
    """A refusal of one sentence."""
    headers = {} if retry is None else {"Retry-After": str(retry)}
    body = encode({"error": " ".join(sentence.split()), "field": field})
    return Response(body, status, headers, media_type="application/json")


async def refuse(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses, such as a method that a route does not have."""
    status, headers = getattr(error, "status_code", 400), getattr(error, "headers", None)
    return JSONResponse({"error": getattr(error, "detail", "this is refused"), "field": None}, status, headers)


async def fail(request: Request, error: Exception) -> Response:
    """A mistake of the lab itself, whose traceback the server logs."""
    response = mistake(f"the lab failed with {type(error).__name__}; the terminal says where", 500)
    response.headers.update(HEADERS)  # the guard does not see this one
    return response
