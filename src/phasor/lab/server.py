"""The server of the lab: the files of the page, and the endpoints of the table with their limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phasor.config import NormConfig, PlacementConfig
from phasor.lab.answers import Answer, encode, mistake
from phasor.lab.chinese import translate
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.figures import DOCUMENTS, FIGURES
from phasor.lab.folders import Folders
from phasor.lab.guard import HEADERS, LOCAL, Guard
from phasor.lab.openapi import openapi
from phasor.lab.schemes import describe_schemes
from phasor.lab.views import import_views
from phasor.lab.views.extension import method_names
from phasor.lab.workers import WorkerPool

PAGE = Path(__file__).parent / "page"
VIEWS = ("order", "encodings", "phasors", "precision", "extension", "parts", "runs", "sources")  # as a story

MAX_BODY = 2 << 20  # bytes; a config.json of 1 MB, escaped in JSON
COMPUTING = 2  # at once
MEMORY = 1 << 30  # bytes that a computation may take
SECONDS, GRACE = 20.0, 1.0  # that it may take, and that it has to finish when its client has left
# A model of a folder takes the memory of its weights, and its loading goes on for a while when a client has left.
FOLDER_SECONDS, FOLDER_GRACE = 600.0, 20.0

MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def build_app(
    folders: Sequence[str | Path] = (),
    *,
    hosts: Iterable[str] = LOCAL,
    numeric_hosts: bool = False,
    version: str = "",
    modules: Sequence[str] = (),
) -> Starlette:
    """The application: `hosts` are the names by which it may be asked for, with `numeric_hosts` any address too.

    `modules` are imported by the worker processes too: they may register position schemes and endpoints.

    >>> [route.path for route in build_app().routes][:2]
    ['/', '/openapi.json']
    """
    import_views()
    shared = Folders(folders)
    files = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in MEDIA_TYPES}
    document = openapi(ENDPOINTS.values(), version)
    pool = WorkerPool(COMPUTING, seconds=SECONDS, grace=GRACE, memory=MEMORY, modules=modules)
    # Views that read folders have a worker each, which keeps the model it has loaded, or the metrics it has read.
    readers = {
        endpoint.view: WorkerPool(
            1, seconds=FOLDER_SECONDS, grace=FOLDER_GRACE, memory=None, modules=modules, lazy=True
        )
        for endpoint in ENDPOINTS.values()
        if endpoint.folders and folders
    }

    async def page(request: Request) -> Response:
        if request.url.path in ENDPOINTS:
            raise HTTPException(405, "this endpoint answers POST", {"Allow": "POST"})
        path = files.get(request.path_params.get("path", "index.html"))
        if path is None:
            return respond(request, mistake("there is no such file", 404))
        return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])

    async def about(request: Request) -> Response:
        views = [view for view in VIEWS if f"js/views/{view}.js" in files]
        return JSONResponse(
            {
                "version": document["info"]["version"],
                "views": views,
                "folders": shared.names,
                "schemes": describe_schemes(),
                "extensions": method_names(),
                "norms": list(NormConfig.kinds),
                "placements": list(PlacementConfig.kinds),
            }
        )

    async def figures(request: Request) -> Response:
        return JSONResponse({"documents": DOCUMENTS, "figures": [asdict(figure) for figure in FIGURES]})

    async def describe(request: Request) -> Response:
        return JSONResponse(document)

    async def compute(request: Request) -> Response:
        endpoint = ENDPOINTS.get(request.url.path)
        if endpoint is None:
            return respond(request, mistake("there is no such endpoint; /openapi.json lists them", 404))
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return respond(request, mistake("the body must be application/json", 415))
        try:
            body = await read_body(request)
        except ValueError as error:
            return respond(request, mistake(str(error), 413))
        except ClientDisconnect:
            return Response(status_code=499)
        reader = readers.get(endpoint.view) if endpoint.folders else None
        if reader is None:
            return respond(request, await pool.run(request, endpoint.path, body))
        found = await anyio.to_thread.run_sync(shared.list)  # here, so that numbers are the same in all workers
        return respond(request, await reader.run(request, endpoint.path, body, [folder.to_plain() for folder in found]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.start)
            yield
            group.cancel_scope.cancel()
        for one in (pool, *readers.values()):
            one.stop()

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
        lifespan=lifespan,
    )


async def read_body(request: Request) -> bytes:
    """The body of a request, or a ValueError where it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ValueError(f"the request has more than {MAX_BODY >> 20} MiB")
    return bytes(body)


def respond(request: Request, answer: Answer) -> Response:
    """The response to a request; a refusal of one by the Chinese page is in Chinese."""
    content = answer.content
    if answer.status >= 400 and content and request.headers.get("accept-language", "").startswith("zh"):
        refusal = json.loads(content)
        content = encode({**refusal, "error": translate(refusal["error"])})
    return Response(content, answer.status, answer.headers)


async def refuse(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses, such as a method that a route does not have."""
    status, headers = getattr(error, "status_code", 400), getattr(error, "headers", None)
    return JSONResponse({"error": getattr(error, "detail", "this is refused"), "field": None}, status, headers)


async def fail(request: Request, error: Exception) -> Response:
    """A mistake of the lab itself, whose traceback the server logs."""
    response = respond(request, mistake(f"the lab failed with {type(error).__name__}; the terminal says where", 500))
    response.headers.update(HEADERS)  # the guard does not see this one
    return response
