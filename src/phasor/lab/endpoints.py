"""The table of what the page can ask for: an endpoint is a record of the request and a function that answers it.

- `LabRequest` is the base of every record: a `Config` whose fields may have bounds, by `bounded_field`.
- `register` adds an endpoint, `POST /api/<view>/<name>`; OpenAPI and the routes of the server are made from the table.
- A function returns plain data, which travels as JSON, or a `Matrix`, which travels as float32 bytes.
- A mistake is a ValueError of one sentence. `FieldError` also names the field of the request that is wrong;
  for the errors of configurations `locate_field` finds it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from phasor.config.schema import Choice, Config, coerce, field_types, fields, names, quote

MAX_HEAD_DIM = 512
MAX_ELEMENTS = 1 << 21  # of a matrix
MAX_TOKENS = 512  # of a text
MAX_POSITION = 1 << 36

MINIMUM, MAXIMUM, MAX_ITEMS = "minimum", "maximum", "maxItems"


class FieldError(ValueError):
    """A mistake in one field of a request: the page shows the sentence beside the control of that field.

    >>> FieldError("query", "query must be at most 2^36, not 2^40").field
    'query'
    """

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def bounded_field(
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    maximum: float | None = None,
    max_items: int | None = None,
) -> Any:
    """A field of a `LabRequest` with bounds: of a number, of the length of a text, or of the numbers of a list.

    `max_items` bounds how many there are in a list. OpenAPI states the bounds.

    >>> class SpanRequest(LabRequest):
    ...     start: int = bounded_field(0, 0, 2**36)
    >>> SpanRequest(start=-1)
    Traceback (most recent call last):
    ...
    phasor.lab.endpoints.FieldError: start must be at least 0, not -1
    """
    given = {MINIMUM: minimum, MAXIMUM: maximum, MAX_ITEMS: max_items}
    metadata = {name: bound for name, bound in given.items() if bound is not None}
    return dataclasses.field(default=default, metadata=metadata)


class LabRequest(Config):
    """What the page asks for. Fields are checked by their types and by the bounds that `bounded_field` gave them.

    A subclass that overrides `check` calls `super().check()` first.
    """

    def check(self) -> None:
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if value is not None and field.metadata:
                check_bounds(field.name, value, field.metadata)


def check_bounds(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    """Raise FieldError where a number, the length of a text or a number of a list is out of bounds."""
    if isinstance(value, tuple):
        if len(value) > bounds.get(MAX_ITEMS, len(value)):
            raise FieldError(name, f"{name} must have at most {bounds[MAX_ITEMS]} items, not {len(value)}")
        for one in value:
            check_bounds(name, one, bounds)
        return
    size = len(value) if isinstance(value, str) else value
    what = f"{name} must have" if isinstance(value, str) else f"{name} must be"
    unit = " characters" if isinstance(value, str) else ""
    shown = f"{size}{unit}" if isinstance(value, str) else quote(value)
    if MINIMUM in bounds and size < bounds[MINIMUM]:
        raise FieldError(name, f"{what} at least {bounds[MINIMUM]:,}{unit}, not {shown}")
    if MAXIMUM in bounds and size > bounds[MAXIMUM]:
        raise FieldError(name, f"{what} at most {bounds[MAXIMUM]:,}{unit}, not {shown}")


@dataclass(frozen=True)
class Matrix:
    """Values that are sent as float32 bytes, row by row, with their shape; `notes` are a few plain values beside them.

    >>> Matrix.of([[1.0, 2.0], [3.0, 4.0]]).shape
    (2, 2)
    """

    data: bytes
    shape: tuple[int, ...]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, values: Any, **notes: Any) -> Matrix:
        """The matrix of a tensor, an array or nested lists."""
        import numpy

        numbers = values.detach().float().cpu().numpy() if hasattr(values, "detach") else values
        array = numpy.ascontiguousarray(numbers, dtype="<f4")
        return cls(array.tobytes(), array.shape, notes)


@dataclass(frozen=True)
class Endpoint:
    """One thing that the page can ask for."""

    view: str
    name: str
    record: type[LabRequest]
    function: Callable[..., Any]
    folders: bool = False

    @property
    def path(self) -> str:
        return f"/api/{self.view}/{self.name}"

    def answer(self, body: Any, folders: Any = None) -> Any:
        """What the function returns for the body of a request; mistakes are ValueErrors."""
        try:
            request = self.record.from_dict(body)
            return self.function(request, folders) if self.folders else self.function(request)
        except FieldError as error:  # of a record inside of the request, where the body shows one
            raise FieldError(locate_field(self.record, body, "") or error.field, str(error)) from error
        except ValueError as error:
            field = locate_field(self.record, body, str(error))
            sentence = str(error).removeprefix(f"{self.record.__name__}.")
            if field is None:
                raise ValueError(sentence) from error
            raise FieldError(field, sentence) from error


ENDPOINTS: dict[str, Endpoint] = {}


def register(
    view: str, name: str, record: type[LabRequest], function: Callable[..., Any], *, folders: bool = False
) -> None:
    """Add an endpoint to the table: `function(record)`, or with `folders` `function(record, folders)`.

    `folders` are those of the command line, a `phasor.lab.folders.Folders`. The docstring of the function is its
    description.

    >>> class DoubleRequest(LabRequest):
    ...     number: float = 1.0
    >>> register("example", "double", DoubleRequest, lambda request: {"twice": 2 * request.number})
    >>> ENDPOINTS.pop("/api/example/double").answer({"number": 4})
    {'twice': 8.0}
    """
    endpoint = Endpoint(view, name, record, function, folders)
    if endpoint.path in ENDPOINTS:
        raise ValueError(f"the endpoint {endpoint.path} is registered already")
    ENDPOINTS[endpoint.path] = endpoint


def locate_field(record: type[Config], body: Any, sentence: str) -> str | None:
    """The field of a body that an error is about, such as "a.b", or None where the error names no field.

    >>> from phasor.config import RMSNormConfig
    >>> locate_field(RMSNormConfig, {"eps": "x"}, "RMSNormConfig.eps must be a number, not 'x'")
    'eps'
    """
    if not isinstance(body, Mapping):
        return None
    kind = body.get("kind")
    if issubclass(record, Choice) and isinstance(kind, str) and kind in record.kinds:
        record = record.kinds[kind]
    hints = field_types(cast(Any, record))
    for name in names(record):
        inner = config_type(hints[name])
        if name not in body or inner is None:
            continue
        try:
            coerce(body[name], hints[name], name)
        except FieldError as error:
            return f"{name}.{error.field}"
        except ValueError as error:
            below = locate_field(inner, body[name], str(error))
            return name if below is None else f"{name}.{below}"
    match = re.match(r"(?:[A-Z]\w*\.)?(\w+)\b", sentence)
    return match.group(1) if match and match.group(1) in names(record) else None


def config_type(hint: Any) -> type[Config] | None:
    """The configuration among the types of a field, if there is one."""
    options: Sequence[Any] = typing.get_args(hint) or (hint,)
    return next((one for one in options if isinstance(one, type) and issubclass(one, Config)), None)
