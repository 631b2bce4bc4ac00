"""The fields of a recipe as options: `--data.sequence-length 128`, and anything below `--model.`."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from phasor.cli.options import format_value
from phasor.cli.parser import Verb
from phasor.config.model import ModelConfig
from phasor.config.overrides import fields_of, is_choice, without_none
from phasor.config.recipe import DEFAULT, Recipe
from phasor.config.recipe_help import GROUPS, HELP
from phasor.config.schedules import ScheduleConfig
from phasor.models.presets import PRESETS

PLACEHOLDERS = {bool: "TRUE|FALSE", int: "N", float: "X", str: "TEXT"}
RECORDS = {  # how the checks of a recipe name its parts
    "TrainConfig": "train",
    "DataConfig": "data",
    "OptimizerConfig": "optimizer",
    "SaveConfig": "save",
    "MeshConfig": "parallel",
    "ModelConfig": "model",
    "LoRAConfig": "lora",
    "ClassifyConfig": "classify",
    "EmbedConfig": "embed",
    "DistillConfig": "distill",
    "PreferenceConfig": "preference",
    "Recipe": "",
    "ScheduleConfig": "schedule",
    **{kind.__name__: "schedule" for kind in ScheduleConfig.kinds.values()},
}
BELOW_MODEL = (
    "What is left out is the preset's. Fields of a part stand below it, as in --model.position.base 5e5; "
    "`phasor kinds` says what each kind is."
)


class Change(argparse.Action):
    """Stores the new value of a field under its dotted name; the last one given counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, text = str(option_string).removeprefix("--"), values
        if name == "set":
            name, equals, text = values.partition("=")
            if not equals:
                parser.error(f"--set takes FIELD=VALUE, not {values!r}")
        field = name.replace("-", "_")
        namespace.changes = namespace.changes | {field: text}
        namespace.typed = namespace.typed | {field: name if option_string == "--set" else str(option_string)}


def add_recipe_options(parser: Verb) -> None:
    """An option for every field of a recipe, in groups, left in `changes` by dotted names."""
    parser.set_defaults(changes={}, typed={})
    parser.add_argument("--set", action=Change, metavar="FIELD=VALUE", help="another way to say --FIELD VALUE")
    groups = {
        name: parser.add_argument_group(title, BELOW_MODEL if name == "model" else None)
        for name, title in GROUPS.items()
    }
    for name, line in HELP.items():
        record, _, field = name.rpartition(".")
        option, metavar, more = part_help(field) if record == "model" else field_help(name)
        text = f"{line}{more}".replace("%", "%%")
        groups[record].add_argument(f"--{option.replace('_', '-')}", action=Change, metavar=metavar, help=text)
        if "_" in option:  # as recipes write it
            parser.add_argument(f"--{option}", action=Change, help=argparse.SUPPRESS)
    parser.accept_prefix("--model.", Change)


def name_options(message: str, typed: Mapping[str, str]) -> str:
    """An error message with the fields of a recipe as options: as they were typed, or as they would be.

    >>> name_options("TrainConfig.steps must be an integer; set data.errors", {"train.steps": "--train.steps"})
    '--train.steps must be an integer; set --data.errors'
    """

    def option(match: re.Match[str]) -> str:
        record, name = match.groups()
        field = f"{RECORDS.get(record, record)}.{name}".removeprefix(".")
        known = field in HELP and (record in RECORDS or "." in field)
        return typed.get(field, f"--{field.replace('_', '-')}") if known else match.group()

    return re.sub(r"(?<![\w./-])(\w+)\.(\w+)\b(?![/\\])", option, message)


def field_help(name: str) -> tuple[str, str, str]:
    """A field's option, what stands for its value in the help, and its default in words.

    >>> field_help("data.sequence_length"), field_help("train.ema_decay")
    (('data.sequence_length', 'N', ' (default: 256)'), ('train.ema_decay', 'X', ''))
    """
    hint: Any = Recipe
    for step in name.split("."):
        hint = without_none(fields_of(hint)[step])
    default = default_of(name)
    return name, placeholder(hint), f" (default: {default})" if default else ""


def part_help(field: str) -> tuple[str, str, str]:
    """The same for a field of the model; in place of a default it lists the choices, or the fields."""
    hint = without_none(fields_of(ModelConfig)[field])
    if field == "preset":
        return "model.preset", "NAME", f": {', '.join(PRESETS)}"
    if is_choice(hint) and hint.default_kind is None:
        return f"model.{field}.kind", "KIND", f": {', '.join(hint.kinds)}"
    if fields_of(hint):
        return f"model.{field}.FIELD", "VALUE", f": {', '.join(fields_of(hint))}"
    return f"model.{field}", placeholder(hint), ""


def placeholder(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return PLACEHOLDERS.get(hint, "VALUE")


def default_of(name: str) -> str:
    """The default of a field, as text; of a choice, by kind where kinds differ.

    >>> default_of("schedule.floor"), default_of("train.cuda_graphs"), default_of("train.ema_decay")
    ('cosine 0.1, linear 0, wsd 0', 'false', '')
    """
    *path, field = name.split(".")
    record: Any = Recipe()
    for step in path:
        optional = without_none(fields_of(type(record))[step])
        record = optional() if getattr(record, step) is None else getattr(record, step)
    if field != "kind" and is_choice(type(record)):
        kinds = {kind: cls() for kind, cls in record.kinds.items()}
        values = {kind: format_value(getattr(one, field)) for kind, one in kinds.items() if hasattr(one, field)}
        agreed = set(values.values())
        return agreed.pop() if len(agreed) == 1 else ", ".join(f"{kind} {value}" for kind, value in values.items())
    return format_value(getattr(record, field))


def without_recipe() -> str:
    """What `phasor train` runs when it is given no recipe: where the default one differs from a recipe's defaults."""
    usual = dict(flat(Recipe().to_dict()))
    fields = [f"{name} {format_value(value)}" for name, value in flat(DEFAULT.to_dict()) if value != usual.get(name)]
    return textwrap.fill("without RECIPE: " + ", ".join(fields), 100, subsequent_indent="  ", break_on_hyphens=False)


def flat(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping under dotted names."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield above + name, value
