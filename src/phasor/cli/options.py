"""Fields of configurations as options."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from phasor.config import Extension, ModelConfig
from phasor.config.schema import field_types, names

ON_HUB = "OWNER/NAME[@REVISION] on the Hugging Face hub"  # a model where a folder is taken
NUMBERS = {"N": int, "X": float}
METAVARS = {
    "boolean": "TRUE|FALSE",
    "numbers": "N,N,...",
    "one_or_numbers": "N,N,...",
    "words": "TEXT,...",
    "sequences": "N,N;N;...",
}


EXTENSION_FIELDS = {
    "factor": "how many times longer than the original length the model is to read",
    "original_length": "length the model was trained at (by default its own)",
    "beta_fast": "yarn: pairs with more rotations than this in the original length keep their frequency",
    "beta_slow": "yarn: pairs with fewer rotations than this are divided by the factor",
    "truncate": "yarn: whether the ends of the ramp between both are rounded to whole pairs",
    "attention": "yarn, longrope: what rotated queries and keys are multiplied by (by default it follows the factor)",
    "mscale": "yarn: weight of ln(factor) in that multiplier, above the line of its fraction",
    "mscale_all_dim": "yarn: the same, below the line",
    "low_freq_factor": "llama3: pairs with fewer rotations than this in the original length are divided",
    "high_freq_factor": "llama3: pairs with more rotations than this keep their frequency",
    "short_factor": "longrope: divisor of each pair, for texts up to the original length",
    "long_factor": "longrope: divisor of each pair, for longer texts",
    "fraction": "proportional: fraction of the pairs that rotate",
}


def declare_options(parser: Any, options: Mapping[str, str], *, default: Any = None) -> None:
    """Add options by what is typed, with their help; `--rows N` takes an integer, `--lr X` a number, `--join` nothing.

    With SUPPRESS as default, options that are not given are absent, so that the defaults of a function apply.

    >>> parser = argparse.ArgumentParser()
    >>> declare_options(parser, {"--rows N": "rows to measure", "--join": "all documents as one"})
    >>> parser.parse_args(["--rows", "3"])
    Namespace(rows=3, join=False)
    """
    for typed, line in options.items():
        name, _, value = typed.partition(" ")
        if value:
            parser.add_argument(name, metavar=value, type=NUMBERS.get(value, str), default=default, help=line)
        else:
            parser.add_argument(name, action="store_true", default=default or False, help=line)


def given_options(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of some options that were given, of which others are absent."""
    return {name: getattr(given, name) for name in names if hasattr(given, name)}


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """An option for a checkpoint of a run."""
    declare_options(parser, {"--checkpoint STEP|best|last": "a checkpoint of a run instead of the model it ended with"})


def add_part(parser: argparse.ArgumentParser) -> None:
    """An option for a part of a multimodal folder."""
    declare_options(parser, {"--part PART": "text: the text part of a multimodal Hugging Face folder"})


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """An option for adapters of the model, each with a weight if it has one."""
    help = "the folder of an adapter for the model, perhaps with a weight (FOLDER=0.5); again for several, which add up"
    parser.add_argument("--adapter", action="append", metavar="FOLDER", help=help)


def chosen_adapters(given: Sequence[str] | None) -> dict[str, tuple[str, float]] | None:
    """The adapters that were asked for, as `load` takes them.

    >>> chosen_adapters(["one", "two=0.5"]), chosen_adapters(None)
    ({'adapter_1': ('one', 1.0), 'adapter_2': ('two', 0.5)}, None)
    """
    chosen = {}
    for number, text in enumerate(given or (), 1):
        folder, equals, weight = text.rpartition("=")
        try:
            chosen[f"adapter_{number}"] = (folder, float(weight)) if equals else (text, 1.0)
        except ValueError:  # the sign is part of the folder's name
            chosen[f"adapter_{number}"] = (text, 1.0)
    return chosen or None


STORED = "stored"  # the weights of a quantized folder as `load` takes it


def add_weights(parser: Any, help: str, *others: str) -> None:
    """An option for quantized weights; `others` are what it takes beside int8 and int4."""
    parser.add_argument("--weights", choices=["int8", "int4", *others], help=help)


def quantized_bits(weights: str) -> int | str:
    """The bits of quantized weights by their name, as `quantize` takes them.

    >>> quantized_bits("int4"), quantized_bits("nf4")
    (4, 'nf4')
    """
    return int(weights.removeprefix("int")) if weights.startswith("int") else weights


def choose_weights(folder: str, checkpoint: str | None) -> str:
    """The folder to load: as it is given, or that of a checkpoint of the run there."""
    if checkpoint is None:
        return folder
    from phasor.checkpoints.hub import resolve_folder

    return str(resolve_folder(folder, checkpoint))


def add_positions(parser: argparse.ArgumentParser) -> None:
    """Options for other positions than a model has; the fields of an extension are added by `add_extension_fields`."""
    options = {
        "--position KIND": "another position scheme (see: phasor kinds positions)",
        "--extension KIND": "another rotary extension, or none (see: phasor kinds extensions)",
    }
    declare_options(parser, options)


def chosen_extension(given: argparse.Namespace, read_config: Callable[[], ModelConfig]) -> Any:
    """The extension that was asked for, whose fields follow from a model's configuration where they are not given."""
    fields = given_fields(given, *extension_classes())
    if given.extension in (None, "none"):
        if fields:
            raise ValueError(f"--{next(iter(fields)).replace('_', '-')} belongs to an extension: add --extension KIND")
        return given.extension
    from phasor.models.extensions import make_extension

    return make_extension(given.extension, read_config(), **fields)


def parse_dtype(name: str | None) -> Any:
    """A floating-point dtype of torch by its name."""
    import torch

    known = ("float32", "bfloat16", "float16", "float64")
    if name is not None and name not in known:
        raise ValueError(f"--dtype must be one of {', '.join(known)}, not {name!r}")
    return None if name is None else getattr(torch, name)


def extension_classes() -> list[type[Any]]:
    return list(Extension.kinds.values())


def add_extension_fields(parser: argparse.ArgumentParser, classes: list[type[Any]] | None = None) -> None:
    """An option for every field of an extension, of all or of some, with the extensions that have it."""
    classes = extension_classes() if classes is None else classes
    helps = {}
    for name in field_parsers(*classes):
        kinds = [cls.kind for cls in classes if name in names(cls)]
        line = EXTENSION_FIELDS[name]
        helps[name] = line if line.startswith(tuple(kinds)) else f"{', '.join(kinds)}: {line}"
    add_fields(parser, "fields of the extension", *classes, helps=helps)


def add_fields(
    parser: argparse.ArgumentParser, title: str, *classes: type[Any], helps: dict[str, str] | None = None
) -> None:
    """Add an option for every field of some configurations; a field that is not given keeps its default."""
    group = parser.add_argument_group(title)
    for name, parse in field_parsers(*classes).items():
        kind = METAVARS.get(parse.__name__, "N")
        line = (helps or {}).get(name, "") + default_of(name, *classes)
        group.add_argument(
            f"--{name.replace('_', '-')}", type=parse, metavar=kind, default=argparse.SUPPRESS, help=line
        )


def default_of(name: str, *classes: type[Any]) -> str:
    """The default of a field, behind its help; nothing where there is none, or not the same in all classes.

    >>> from phasor.config.generation import GenerationConfig
    >>> default_of("max_new_tokens", GenerationConfig), default_of("top_k", GenerationConfig)
    (' (64)', '')
    """
    fields = [field for cls in classes for field in dataclasses.fields(cls) if field.name == name]
    defaults = {"" if f.default in (dataclasses.MISSING, ()) else format_value(f.default) for f in fields}
    (default,) = defaults if len(defaults) == 1 else ("",)
    return f" ({default})" if default else ""


def format_value(value: Any) -> str:
    """A value as the command line takes it; nothing for none."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(map(format_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def given_fields(given: argparse.Namespace, *classes: type[Any]) -> dict[str, Any]:
    """The fields that were given on the command line."""
    return given_options(given, *field_parsers(*classes))


def field_parsers(*classes: type[Any]) -> dict[str, Any]:
    """Every field of some configurations, with the function that parses it."""
    simple = {bool: boolean, int: integer, float: number}
    parsers: dict[str, Any] = {}
    for cls in classes:
        for name in names(cls):
            hint = field_types(cast(Any, cls))[name]
            choices = [a for a in (typing.get_args(hint) or (hint,)) if a is not type(None)]
            lists = [a for a in (hint, *choices) if typing.get_origin(a) is tuple]
            if lists:
                single = int in choices and hint is not lists[0]
                parsers[name] = one_or_numbers if single else list_parser(typing.get_args(lists[0]))
            else:
                parsers[name] = next(simple[a] for a in choices if a in simple)
    return parsers


def list_parser(items: tuple[Any, ...]) -> Any:
    """The function that parses lists of some types: of lists, of texts and numbers, or of numbers."""
    if any(typing.get_origin(item) is tuple for item in items):
        return sequences
    return words if any(str in (item, *typing.get_args(item)) for item in items) else numbers


def sequences(text: str) -> list[list[int]]:
    """Lists of integers between semicolons.

    >>> sequences("1,2;7")
    [[1, 2], [7]]
    """
    return [[int(number) for number in part.split(",")] for part in text.split(";")]


def boolean(text: str) -> bool | str:
    """True or false; anything else is left to the configuration to check."""
    return {"true": True, "false": False}.get(text.lower(), text)


def integer(text: str) -> int | None:
    return None if text == "none" else int(text)


def number(text: str) -> float:
    return float(text)


def numbers(text: str) -> list[float] | list[int]:
    parts = text.split(",")
    return (
        [int(p) for p in parts] if all(p.strip().lstrip("-").isdecimal() for p in parts) else [float(p) for p in parts]
    )


def one_or_numbers(text: str) -> float | list[float] | list[int]:
    """One number, or a list of them.

    >>> one_or_numbers("3"), one_or_numbers("3,4")
    (3, [3, 4])
    """
    found = numbers(text)
    return found[0] if len(found) == 1 else found


def words(text: str) -> list[int | str]:
    """Tokens by number, texts by anything else, between commas; backslash escapes as in Python strings.

    >>> words("2,end,。")
    [2, 'end', '。']
    """
    return [int(p) if p.isdecimal() else unescape(p) for p in text.split(",")]


def unescape(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
