"""The OpenAPI document of the lab, made from the table of endpoints and the fields of their records."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, cast

from phasor.config.schema import DERIVE, Choice, Config, field_types, fields, has_no_default, to_plain
from phasor.lab.endpoints import MAX_ITEMS, MAXIMUM, MINIMUM, Endpoint

MISTAKE = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "field": {"type": ["string", "null"]}},
    "required": ["error"],
}
STATUSES = {
    400: "A mistake in the request, or that it needs too much time or memory: one sentence, and the field it is in.",
    403: "The Host or Origin header names another place than this server.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    503: "Too many computations are waiting.",
}


def openapi(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of some endpoints.

    >>> openapi([], "1.0")["info"]["version"]
    '1.0'
    """
    schemas: dict[str, Any] = {"Mistake": MISTAKE}
    paths = {endpoint.path: {"post": describe(endpoint, schemas)} for endpoint in endpoints}
    return {
        "openapi": "3.1.0",
        "info": {"title": "phasor lab", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def describe(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    """One operation; the schemas of its records are added to `schemas`."""
    mistake = {"application/json": {"schema": {"$ref": "#/components/schemas/Mistake"}}}
    answer: dict[str, Any] = {"application/json": {"schema": {}}, "application/octet-stream": {"schema": {}}}
    responses: dict[str, Any] = {"200": {"description": "Plain data, or a matrix as float32 bytes.", "content": answer}}
    for status, text in STATUSES.items():
        responses[str(status)] = {"description": text, "content": mistake}
    return {
        "operationId": f"{endpoint.view}_{endpoint.name}",
        "tags": [endpoint.view],
        "description": inspect.getdoc(endpoint.function) or "",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema_of(endpoint.record, schemas)}},
        },
        "responses": responses,
    }


def schema_of(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a type; configurations are added to `schemas` and referred to.

    >>> schema_of(tuple[int, ...], {})
    {'type': 'array', 'items': {'type': 'integer', 'format': 'int64'}}
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else schema_of(a, schemas) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0], schemas)}
    if isinstance(hint, type) and issubclass(hint, Config):
        return add_schema(hint, schemas)
    if origin is dict or hint is dict:
        return {"type": "object"}
    plain = {
        int: {"type": "integer", "format": "int64"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
        str: {"type": "string"},
    }
    return plain.get(hint, {})


def add_schema(record: type[Config], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a configuration, which is added where it is new."""
    name = record.__name__
    if name not in schemas:
        schemas[name] = {}  # configurations may contain themselves
        is_base = issubclass(record, Choice) and not hasattr(record, "kind")
        schemas[name] = schema_of_choice(record, schemas) if is_base else schema_of_fields(record, schemas)
    return {"$ref": f"#/components/schemas/{name}"}


def schema_of_choice(choice: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """One of the kinds of a choice: its name, or its fields."""
    return {"anyOf": [{"enum": list(choice.kinds)}, *(add_schema(kind, schemas) for kind in choice.kinds.values())]}


def schema_of_fields(record: type[Config], schemas: dict[str, Any]) -> dict[str, Any]:
    """The object of a configuration's fields, with their bounds and defaults."""
    properties, required = {}, []
    if issubclass(record, Choice):
        properties["kind"] = {"const": record.kind}
        required.append("kind")
    hints = field_types(cast(Any, record))
    for field in fields(record):
        schema = schema_of(hints[field.name], schemas)
        add_bounds(schema, field.metadata)
        if DERIVE in field.metadata:
            schema = {"anyOf": [schema, {"type": "null"}]}
        elif has_no_default(field):
            required.append(field.name)
        elif field.default is not dataclasses.MISSING:
            schema["default"] = to_plain(field.default)
        properties[field.name] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def add_bounds(schema: dict[str, Any], bounds: Any) -> None:
    """Write the bounds of a field into its schema, and into that of the items of a list."""
    for one in schema.get("anyOf", [schema]):
        if one.get("type") == "array":
            add_bounds(one["items"], {name: bound for name, bound in bounds.items() if name != MAX_ITEMS})
            if MAX_ITEMS in bounds:
                one["maxItems"] = bounds[MAX_ITEMS]
        elif one.get("type") in ("integer", "number"):
            one.update({name: bounds[name] for name in (MINIMUM, MAXIMUM) if name in bounds})
        elif one.get("type") == "string":
            lengths = {"minLength": MINIMUM, "maxLength": MAXIMUM}
            one.update({name: bounds[bound] for name, bound in lengths.items() if bound in bounds})
