"""Overrides of recipe fields by dotted name, as given on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from phasor.config.model import ModelConfig
from phasor.config.recipe import Recipe
from phasor.config.schema import Choice, Config, describe_type, field_types, names, quote, unknown, with_article
from phasor.config.yaml_text import from_yaml


def apply_overrides(recipe: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a recipe's mapping with some fields overridden.

    Values are parsed as YAML, and "none" is None where a field may be None; a string field takes its value verbatim,
    and a list of strings those between commas.
    A new kind keeps those fields of the old one that both have and that differ from the old one's defaults.

    >>> apply_overrides({"data": {"sequence_length": 256}}, {"data.sequence_length": "128", "train.max-skips": "3"})
    {'data': {'sequence_length': 128}, 'train': {'max_skips': 3}}
    >>> apply_overrides({"model": {"position": "rotary"}}, {"model.position.base": "5e5"})
    {'model': {'position': {'kind': 'rotary', 'base': 500000.0}}}
    """
    result = deep_copy(recipe)
    for name in sorted(changes, key=lambda name: (name.count("."), not name.endswith(".kind"))):
        set_field(result, name, changes[name])
    return result


def set_field(recipe: dict[str, Any], name: str, text: str) -> None:
    """Set one field by its dotted name."""
    *path, last = name.replace("-", "_").split(".")
    inner: dict[str, Any] = recipe
    hint: Any = Recipe
    for depth, step in enumerate(path):
        hint = without_none(field_type(hint, step))
        value = inner.get(step)
        if isinstance(value, str) and is_choice(hint):
            value = {"kind": value}
        if not isinstance(value, dict | None) or not fields_of(hint):
            what = describe_type(hint) if value is None else quote(value)
            raise ValueError(f"--{name}: {'.'.join(path[: depth + 1])} is {what}, which has no fields")
        inner[step] = {} if value is None else value
        inner = inner[step]
    value = read_value(text, field_type(hint, last), f"--{name}")
    if last == "kind" and is_choice(hint) and inner.get("kind") != value:
        kept = names(hint.kinds[value]) if value in hint.kinds else []
        before = hint.kinds.get(inner.get("kind"))
        defaults = {} if before is None else {field.name: field.default for field in dataclasses.fields(before)}
        for other in list(inner):
            if other not in kept or inner[other] == defaults.get(other, dataclasses.MISSING):
                del inner[other]
    inner[last] = value


def field_type(record: Any, name: str) -> Any:
    """The type of a configuration's field, or a ValueError with the closest name."""
    known = fields_of(record)
    if name not in known:
        owner = "Recipe.model" if record is ModelConfig else record.__name__
        raise unknown(f"field of {with_article(record.what) if is_choice(record) else owner}", name, known)
    return known[name]


def fields_of(hint: Any) -> dict[str, Any]:
    """The fields of a type, with their types; of a choice, those of all its kinds.

    >>> list(fields_of(Recipe))[:3], fields_of(int)
    (['task', 'model', 'data'], {})
    """
    if is_choice(hint):
        kinds = reversed(hint.kinds.values())
        return {"kind": Literal[*hint.kinds]} | {n: field_types(kind)[n] for kind in kinds for n in names(kind)}
    if not isinstance(hint, type) or not issubclass(hint, Config):
        return {}
    types_of: Any = field_types
    fields = {name: types_of(hint)[name] for name in names(hint)}
    if hint is Recipe:
        return fields | {"model": ModelConfig}
    return {"preset": str} | fields if hint is ModelConfig else fields


def read_value(text: str, hint: Any, where: str) -> Any:
    """The value of a field from its text on the command line."""
    if not text:
        raise ValueError(f"{where} needs a value{', or none' if may_be_none(hint) else ''}, not empty text")
    if takes_text(hint):
        return None if text in ("null", "~") else text
    if text == "none" and may_be_none(hint):
        return None
    if takes_names(hint) and not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    return from_yaml(text, where)


def takes_names(hint: Any) -> bool:
    """Whether a field is a list of texts, optional or not, which is given separated by commas.

    >>> takes_names(tuple[str, ...] | None), takes_names(tuple[float, ...]), takes_names(str)
    (True, False, False)
    """
    hint = without_none(hint)
    return get_origin(hint) is tuple and takes_text(get_args(hint)[0])


def deep_copy(value: Any) -> Any:
    """A copy of nested mappings and lists; other values are shared."""
    if isinstance(value, Mapping):
        return {key: deep_copy(inner) for key, inner in value.items()}
    return [deep_copy(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Choice)


def may_be_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


def without_none(hint: Any) -> Any:
    """The type of an optional field without None.

    >>> without_none(int | None), without_none(int)
    (<class 'int'>, <class 'int'>)
    """
    others = [a for a in get_args(hint) if a is not type(None)]
    return others[0] if may_be_none(hint) and len(others) == 1 else hint


def takes_text(hint: Any) -> bool:
    """Whether a field is a string, optional or not."""
    hint = without_none(hint)
    return hint is str or (get_origin(hint) is Literal and all(isinstance(a, str) for a in get_args(hint)))
