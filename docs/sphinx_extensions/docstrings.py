"""Docstrings, signatures and fields as Markdown, which the reference is made of."""

import dataclasses
import inspect
import re
from typing import Any

from phasor.cli.recipe_options import RECORDS
from phasor.config.generation import OPTIONS
from phasor.config.recipe_help import HELP

SPECIAL = re.compile(r"([*_<$\[\]|])")


def escape(text: str) -> str:
    """Prose of which Markdown makes what it says, with its code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def to_markdown(docstring: str) -> str:
    """A docstring whose examples are blocks of code."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring.strip()):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```pycon\n{inspect.cleandoc(block)}\n```")
        elif block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(escape(block))
    return "\n\n".join(blocks)


def document(name: str, value: Any) -> str:
    """The entry of a class or a function, whose name is that in the package."""
    text = to_markdown(inspect.getdoc(value) or "")
    if not inspect.isclass(value):
        return entry("function", f"{name}{signature(value)}", text)
    if dataclasses.is_dataclass(value):
        return entry("class", name, f"{text}\n\n{fields_table(value)}")
    members = [member(value, owner, key) for owner in reversed(own_bases(value)) for key in vars(owner)]
    return entry("class", f"{name}{signature(value)}", "\n\n".join([text, *filter(None, members)]))


def entry(directive: str, signature: str, text: str, fence: str = "::::::") -> str:
    """A directive of Sphinx's domain for Python."""
    return f"{fence}{{py:{directive}}} {signature}\n\n{text}\n{fence}"


def signature(value: Any) -> str:
    """Parameters with their types and defaults."""
    found = inspect.signature(value)
    parameters = [p for p in found.parameters.values() if p.name != "self" and not p.name.startswith("_")]
    returns = inspect.Signature.empty if inspect.isclass(value) else found.return_annotation
    text = str(found.replace(parameters=parameters, return_annotation=returns))
    return re.sub(r"<factory>|<[^<>]* object at 0x\w+>", "...", text).replace("'", "")


def own_bases(cls: type[Any]) -> list[type[Any]]:
    """A class and those it is made of that are phasor's."""
    return [base for base in cls.__mro__ if base.__module__.startswith("phasor.")]


def member(cls: type[Any], owner: type[Any], name: str) -> str | None:
    """The entry of a public method or property, in the class that has its last word; None for anything else."""
    found = vars(owner)[name]
    latest = next(base for base in own_bases(cls) if name in vars(base))
    if name.startswith("_") or latest is not owner or name == "forward":
        return None
    text = to_markdown(inspect.getdoc(found) or "")
    if isinstance(found, property):
        return entry("property", name, text, fence=":::::") if text else None
    function = getattr(found, "__func__", found)
    if not inspect.isfunction(function) or not text:
        return None
    directive = {classmethod: "classmethod", staticmethod: "staticmethod"}.get(type(found), "method")
    return entry(directive, f"{name}{signature(getattr(cls, name))}".replace("(self, ", "("), text, fence=":::::")


def fields_table(cls: type[Any]) -> str:
    """The fields of a record: types, defaults, and what help says of them."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    helps = [help_of(cls, field.name) for field in fields]
    head = ["field", "type", "default"] + (["what it is"] if any(helps) else [])
    rows = [head, ["---"] * len(head)]
    for field, line in zip(fields, helps, strict=True):
        kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        rows.append([f"`{field.name}`", code(kind), code(default_of(field)), escape(line)][: len(head)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) if fields else ""


def help_of(cls: type[Any], name: str) -> str:
    """The line on a field that the command line shows."""
    if cls.__name__ == "GenerationConfig":
        return OPTIONS.get(name, "")
    return HELP.get(f"{RECORDS.get(cls.__name__, '?')}.{name}".removeprefix("."), "")


def default_of(field: "dataclasses.Field[Any]") -> str:
    """The default of a field as it would be written; empty where it has to be given."""
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else ""


def code(text: str) -> str:
    """A code span in a cell of a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""
