"""The answers of endpoints to the bodies of requests: JSON or bytes, and mistakes of one sentence."""

from __future__ import annotations

import json
import math
import sys
import traceback
from typing import Any, NamedTuple

from phasor.config.schema import json_value, shorten, unique_keys
from phasor.lab.endpoints import ENDPOINTS, MAX_ELEMENTS, Matrix
from phasor.lab.folders import FolderList

JSON, BYTES = "application/json", "application/octet-stream"
# What torch says where the system gives it no memory: a RuntimeError, as for everything else.
NO_MEMORY = ("can't allocate memory", "bad_alloc", "size calculation overflowed")


class Answer(NamedTuple):
    """What is sent back: a status, headers and the content."""

    status: int
    headers: dict[str, str]
    content: bytes


class OutOfMemoryError(Exception):
    """A computation needs more memory than it may have."""


def answer(path: str, body: bytes, folders: FolderList) -> Answer:
    """The answer of an endpoint to the body of a request; OutOfMemoryError where it needs more than there is.

    >>> from phasor.lab.endpoints import LabRequest, register
    >>> class TwiceRequest(LabRequest):
    ...     number: float = 1.0
    >>> register("example", "twice", TwiceRequest, lambda request: 2 * request.number)
    >>> answer("/api/example/twice", b'{"number": 4}', FolderList()).content
    b'8.0'
    >>> _ = ENDPOINTS.pop("/api/example/twice")
    """
    try:
        result = ENDPOINTS[path].answer(parse(body), folders)
        if isinstance(result, Matrix) and math.prod(result.shape) > MAX_ELEMENTS:
            raise ValueError(f"this matrix has {math.prod(result.shape):,} elements; at most {MAX_ELEMENTS:,} are sent")
    except ValueError as error:
        return mistake(str(error), field=getattr(error, "field", None))
    except RecursionError:
        return mistake("this request is nested too deeply")
    except MemoryError:
        raise OutOfMemoryError from None
    except Exception as error:
        if isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY):
            raise OutOfMemoryError from None
        traceback.print_exc(file=sys.stderr)
        return mistake(f"the lab failed with {type(error).__name__}; the terminal says where", 500)
    if isinstance(result, Matrix):
        notes = json.dumps(json_value(result.notes))
        return Answer(
            200, {"Content-Type": BYTES, "X-Shape": ",".join(map(str, result.shape)), "X-Notes": notes}, result.data
        )
    return Answer(200, {"Content-Type": JSON}, encode(result))


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
    return json.dumps(json_value(result), ensure_ascii=False).encode("utf-8", "replace")


def mistake(sentence: str, status: int = 400, field: str | None = None, retry: int | None = None) -> Answer:
    """A refusal of one sentence.

    >>> mistake("this is too long", field="text").content
    b'{"error": "this is too long", "field": "text"}'
    """
    headers = {"Content-Type": JSON} | ({} if retry is None else {"Retry-After": str(retry)})
    return Answer(status, headers, encode({"error": " ".join(sentence.split()), "field": field}))
