"""What every configuration shares: frozen keyword-only dataclasses, validated on construction, JSON both ways.

- `Config` validates the names and types of its fields on construction, so that an error is reported where the
  mistake was written.
- `Choice` is a configuration that is one of several kinds. Its subclasses register under a short name, and
  wherever a field expects the choice, that name (or a dict with the key "kind") is accepted as well.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, dataclass_transform

C = TypeVar("C", bound="Config")

QUOTE_LENGTH = 120  # characters of a value in an error message
SENTENCE_LENGTH = 1000  # characters of an error message
# The most that a model may have, far beyond any there is: a file with more would take all time and memory to read.
MOST_LAYERS, MOST_HEAD_DIM, MOST_FEATURES, MOST_WIDTH, MOST_LENGTH = 10_000, 1 << 14, 1 << 18, 1 << 28, 1 << 40


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A hint with the closest known name, or an empty string.

    >>> did_you_mean("rotari", ["rotary", "alibi"])
    " (did you mean 'rotary'?)"
    """
    if not isinstance(name, str) or len(name) > QUOTE_LENGTH:
        return ""
    close = difflib.get_close_matches(name, [text for text in known if isinstance(text, str)], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


NO_NAMES: Mapping[str, str] = {}


def unknown(what: str, name: object, known: Iterable[str], former: Mapping[str, str] = NO_NAMES) -> ValueError:
    """The error for an unknown name: it lists the known ones and suggests the closest.

    `former` has the present names of things that had others.

    >>> unknown("color", "crimson", ["red"], {"crimson": "red"})
    ValueError("the color 'crimson' is called 'red' now")
    """
    known = list(known)
    if isinstance(name, str) and name in former:
        return ValueError(f"the {what} {name!r} is called {former[name]!r} now")
    return ValueError(f"unknown {what} {quote(name)}{did_you_mean(name, known)}; known: {', '.join(known) or 'none'}")


class ShortRepr(reprlib.Repr):
    """A `repr` whose cost is bounded: nested lists that share their parts stand for exponentially long texts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 12
        self.maxother = QUOTE_LENGTH + 1  # one more than is shown, so that `quote` shows that it is cut

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: self.maxother])

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 1 << 13 else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(x[k], level - 1)}" for k in islice(x, self.maxdict)]
        return "{" + ", ".join([*shown, "..."] if len(x) > len(shown) else shown) + "}"


SHORT_REPR = ShortRepr()


def quote(value: object) -> str:
    """The `repr` of a value for an error message: one line of at most 120 characters.

    >>> quote({"kind": "rotary"}), len(quote("x" * 1000))
    ("{'kind': 'rotary'}", 120)
    """
    return shorten(" ".join(SHORT_REPR.repr(value).split()), QUOTE_LENGTH)


def plural(count: int, what: str) -> str:
    """
    >>> plural(1, "row"), plural(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def check_integer(name: str, value: object, least: int = 1, below: int = 1 << 63) -> int:
    """The value, if it is an integer in this range; a ValueError otherwise.

    >>> check_integer("length", 4)
    4
    >>> check_integer("length", 0)
    Traceback (most recent call last):
    ValueError: length must be an integer of at least 1, not 0
    >>> check_integer("rows", 100, below=10)
    Traceback (most recent call last):
    ValueError: rows must be an integer below 10, not 100
    """
    if type(value) is not int or not least <= value < below:
        above = type(value) is int and value >= below
        bound = f"below {below:,}" if above else f"of at least {least}"
        raise ValueError(f"{name} must be an integer {bound}, not {quote(value)}")
    return value


def shorten(text: str, limit: int = SENTENCE_LENGTH) -> str:
    """A text for an error message, cut where it is longer than the limit.

    >>> shorten("a b c d e f", 8)
    'a b c...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def name_some(names: Iterable[object], most: int = 12, separator: str = ", ") -> str:
    """Names for an error message, and how many are left out.

    >>> name_some(["wq", "wk", "wv", "wo"], most=2)
    'wq, wk and 2 more'
    """
    shown = [shorten(str(name), QUOTE_LENGTH) for name in names]
    rest = len(shown) - most
    return separator.join(shown) if rest <= 0 else f"{separator.join(shown[:most])} and {rest} more"


def by_kind(kind: str) -> Any:
    """The default of a choice by its kind, which is looked up on construction and not at class definition."""
    return kind


DERIVE = "derive"


def derived_field(rule: Callable[[Any], Any]) -> Any:
    """A field that may be left out (or None): its value then follows from the other fields, by `rule(config)`.

    `replace` and `to_dict` keep it left out, so that it follows the fields that are changed later.
    """
    return dataclasses.field(default=None, metadata={DERIVE: rule})


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Config:
    """A frozen dataclass of named fields. Subclasses list fields and validate them in `check`.

    `left_out` names the `derived_field`s that were not given, whose values follow from other fields.
    """

    left_out: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        generated_init: Callable[..., None] = cls.__init__

        @functools.wraps(generated_init)
        def init(self: Config, *args: Any, **given: Any) -> None:
            if args:
                raise ValueError(f"{cls.__name__} takes its fields by name, as in {cls.__name__}({names(cls)[0]}=...)")
            for name in given:
                if name not in names(cls):
                    raise unknown(f"field of {cls.__name__}", name, names(cls))
            missing = [f.name for f in fields(cls) if f.name not in given and has_no_default(f)]
            if missing:
                raise ValueError(f"{cls.__name__} needs {', '.join(missing)}")
            generated_init(self, **given)

        setattr(cls, "__init__", init)  # noqa: B010

    def __post_init__(self) -> None:
        hints: dict[str, Any] = field_types(cast(Any, type(self)))
        left_out = [f for f in fields(type(self)) if DERIVE in f.metadata and getattr(self, f.name) is None]
        object.__setattr__(self, "left_out", frozenset(f.name for f in left_out))
        for name in names(type(self)):
            if name not in self.left_out:
                value = coerce(getattr(self, name), hints[name], f"{type(self).__name__}.{name}")
                object.__setattr__(self, name, value)
        for field in left_out:
            object.__setattr__(self, field.name, field.metadata[DERIVE](self))
        self.check()

    def given(self, name: str) -> Any:
        """A field as it was given: None where its value was derived from other fields."""
        return None if name in self.left_out else getattr(self, name)

    def check(self) -> None:
        """Raise ValueError for invalid values; does nothing by default."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again.

        >>> from phasor.config import RMSNormConfig
        >>> RMSNormConfig().replace(eps=1e-5).eps
        1e-05
        """
        return type(self)(**{n: self.given(n) for n in names(type(self))} | changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; `from_dict` reads them back."""
        return {name: to_plain(self.given(name)) for name in names(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; missing fields take their defaults, unknown ones are refused."""
        return cls(**named_fields(cls, data))

    def to_json(self) -> str:
        """`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            data = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"this is not JSON: {shorten(str(error), 300)}") from None
        return cls.from_dict(data)


class Choice(Config):
    """A configuration that is one of several kinds: `class ALiBiConfig(PositionConfig, kind="alibi")`.

    A mapping without a kind is of the `default_kind`, where the choice has one. A kind that was named `formerly` is
    refused by that name, with the present one.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Any]]]
    former_kinds: ClassVar[dict[str, str]]
    what: ClassVar[str]
    default_kind: ClassVar[str | None] = None

    def __init_subclass__(
        cls,
        kind: str | None = None,
        what: str | None = None,
        default: str | None = None,
        formerly: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if what is not None:
            cls.what, cls.kinds, cls.default_kind, cls.former_kinds = what, {}, default, {}
        if kind is not None and formerly is not None:
            cls.former_kinds[formerly] = kind
        if kind is not None:
            if kind in cls.kinds:
                raise ValueError(f"the {cls.what} {kind!r} is registered already, by {cls.kinds[kind].__name__}")
            cls.kind = kind
            cls.kinds[kind] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        given = named_fields(cls.kinds.get(cls.default_kind or "", cls), data)
        kind = given.pop("kind", getattr(cls, "kind", cls.default_kind))
        if kind is None:
            raise ValueError(f"{with_article(cls.what)} needs its 'kind', one of: {', '.join(cls.kinds)}")
        if not isinstance(kind, str) or kind not in cls.kinds:
            raise unknown(cls.what, kind, cls.kinds, cls.former_kinds)
        chosen = cls.kinds[kind]
        if not issubclass(chosen, cls):
            raise ValueError(f"the kind {kind!r} is a {chosen.__name__}, where a {cls.__name__} is expected")
        return chosen(**given)


def named_fields(cls: type[Config], data: object) -> dict[str, Any]:
    """The mapping as a dict, or a ValueError if it is not a mapping from field names."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} is read from a mapping of its fields, not from {quote(data)}")
    for name in data:
        if not isinstance(name, str):
            raise unknown(f"field of {cls.__name__}", name, names(cls))
    return dict(data)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text, whose keys must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {quote(twice)} stands twice")
    return found


def fields(cls: type[Config]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def names(cls: type[Any]) -> list[str]:
    """The field names of a configuration, in the order of their definition."""
    return [f.name for f in fields(cls)]


def has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def to_plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: to_plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def json_value(value: Any) -> Any:
    """Records, mappings and paths as values of JSON, which has no numbers that are not finite: None is in their place.

    >>> json_value({"norm": (1.0, float("nan")), "step": 3})
    {'norm': [1.0, None], 'step': 3}
    """
    if isinstance(value, Config):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, os.PathLike) else value


def differences(a: Any, b: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """The fields in which two plain dicts differ, by dotted name, with what each has.

    >>> differences({"dim": 64, "norm": {"kind": "rmsnorm"}}, {"dim": 128, "norm": {"kind": "rmsnorm"}}, "model")
    [('model.dim', 64, 128)]
    """
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        inner = (differences(a.get(key), b.get(key), f"{where}.{key}" if where else key) for key in keys)
        return [found for each in inner for found in each]
    return [] if a == b else [(where, a, b)]


def coerce(value: Any, hint: Any, where: str) -> Any:
    """The value converted to the type of its field, or a ValueError that says what was expected.

    Integers are accepted as floats, lists as tuples, and a kind's name or a dict as a configuration.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return coerce(value, inner[0], where)
        for arg in inner:
            try:
                return coerce(value, arg, where)
            except ValueError:
                continue
        raise ValueError(f"{where} must be {describe_type(hint)}, not {quote(value)}")
    if origin is Literal:
        if not any(type(value) is type(a) and value == a for a in args):
            raise ValueError(
                f"{where} must be one of {', '.join(map(repr, args))}, not {quote(value)}{did_you_mean(value, args)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, not {quote(value)}")
        if isinstance(args[0], type) and issubclass(args[0], Config) and len(value) > MOST_LAYERS:
            raise ValueError(f"{where} must have at most {MOST_LAYERS:,} entries, not {len(value):,}")
        return tuple(coerce(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where} must be a mapping of names, not {quote(value)}")
        return to_plain(value)
    if isinstance(hint, type) and issubclass(hint, Config):
        if isinstance(value, hint):
            return value
        if isinstance(value, str) and issubclass(hint, Choice):
            return hint.from_dict({"kind": value})
        if isinstance(value, Mapping):
            try:
                return hint.from_dict(value)
            except RecursionError:
                raise ValueError(f"{where} is nested too deeply") from None
        raise ValueError(f"{where} must be {describe_type(hint)}, not {quote(value)}")
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise ValueError(f"{where} must be a finite number, not {quote(value)}")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be {describe_type(hint)}, not {quote(value)}")
    if hint is int and abs(value) >= 1 << 63:
        raise ValueError(f"{where} must be an integer of at most 63 bits, not {quote(value)}")
    return value


def describe_type(hint: Any) -> str:
    """A type in words, for error messages."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = ("nothing" if a is type(None) else describe_type(a) for a in typing.get_args(hint))
        return " or ".join(dict.fromkeys(kinds))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list"
    if isinstance(hint, type) and issubclass(hint, Choice):
        return f"{with_article(hint.what)} (one of: {', '.join(hint.kinds)})"
    if isinstance(hint, type) and issubclass(hint, Config):
        return with_article(hint.__name__)
    return words.get(hint, str(hint))


def with_article(noun: str) -> str:
    """
    >>> with_article("extension"), with_article("LayerConfig")
    ('an extension', 'a LayerConfig')
    """
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def summary(thing: object) -> str:
    """The first line of a docstring: what `phasor kinds` prints beside the name."""
    return (thing.__doc__ or "").strip().splitlines()[0]


def at_least_one(config: Config, name: str) -> None:
    if not getattr(config, name) >= 1:
        raise ValueError(f"{type(config).__name__}.{name} must be at least 1, not {getattr(config, name)}")


def greater_than_one(config: Config, name: str) -> None:
    if not getattr(config, name) > 1:
        raise ValueError(f"{type(config).__name__}.{name} must be greater than 1, not {getattr(config, name)}")


def positive(config: Config, *fields: str, most: int | None = None) -> None:
    for name in fields:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{type(config).__name__}.{name} must be greater than 0, not {value}")
    if most is not None:
        at_most(config, most, *fields)


def at_most(config: Config, most: int, *fields: str) -> None:
    for name in fields:
        value = getattr(config, name)
        if value is not None and value > most:
            raise ValueError(f"{type(config).__name__}.{name} must be at most {most:,}, not {value:,}")


def not_negative(config: Config, *fields: str, most: int | None = None) -> None:
    for name in fields:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{type(config).__name__}.{name} must not be negative, not {value}")
    if most is not None:
        at_most(config, most, *fields)
