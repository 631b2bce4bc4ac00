"""The reference: public names from their docstrings and records, commands from their parsers."""

import argparse
import importlib
import pkgutil
import re
from types import ModuleType
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import phasor
from phasor.cli import VERBS
from phasor.cli.parser import Verb
from phasor.inspect.kinds import CHOICES
from sphinx_extensions.docstrings import document, escape, to_markdown
from sphinx_extensions.repository import ROOT

COMMANDS = ROOT / "docs" / "commands.md"


def functions_of_commands() -> list[str]:
    """What docs/commands.md lists beside the commands and is no name of the package itself."""
    names = re.findall(r"`(phasor(?:\.\w+){2,})`", COMMANDS.read_text(encoding="utf-8"))
    return list(dict.fromkeys(names))


def names_of_kinds(group: str) -> list[str]:
    """The public configurations of a group of choices."""
    return [f"phasor.{cls.__name__}" for cls in CHOICES[group].kinds.values() if cls.__name__ in phasor.__all__]


def resolve(name: str) -> Any:
    """What a dotted name stands for; where a package has a function that is named as its module, the function."""
    found = pkgutil.resolve_name(name)
    return getattr(found, name.rpartition(".")[2]) if isinstance(found, ModuleType) else found


class Names(SphinxDirective):
    """Entries of public names: those in the content, those of a group of kinds, or those of commands."""

    has_content = True
    option_spec: ClassVar = {"kinds": directives.unchanged_required, "commands": directives.flag}

    def run(self) -> list[nodes.Node]:
        """The entries, in their order."""
        names = [f"phasor.{name}" for line in self.content for name in line.split()]
        if "kinds" in self.options:
            names += names_of_kinds(self.options["kinds"])
        if "commands" in self.options:
            names += functions_of_commands()
        entries = [document(name.removeprefix("phasor."), resolve(name)) for name in names]
        return self.parse_text_to_nodes("\n\n".join(["```{py:currentmodule} phasor\n```", *entries]))


class Commands(SphinxDirective):
    """A section for every command, as its parser describes it."""

    def run(self) -> list[nodes.Node]:
        """The sections, in the order of `phasor --help`."""
        text = "\n\n".join(describe_command(name, line) for name, line in VERBS.items())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def describe_command(name: str, line: str) -> str:
    """A command in Markdown: what it does, its usage, and its options in their groups."""
    parser = Verb(prog=f"phasor {name}")
    importlib.import_module(f"phasor.cli.{name}").add_options(parser)
    formatter = argparse.HelpFormatter(parser.prog, width=100)
    parts = [f"## phasor {name}", to_markdown(parser.description or f"{line[0].upper()}{line[1:]}.")]
    usage = parser.format_usage().removeprefix("usage: ").strip().replace("\n" + " " * len("usage: "), "\n")
    parts += [f"```text\n{usage}\n```", f"```{{program}} phasor {name}\n```"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if actions and group not in (parser._positionals, parser._optionals):
            parts.append(f"### phasor {name}: {escape(group.title or '')}")
        if group.description:
            parts.append(to_markdown(group.description))
        parts += [describe_option(formatter, action) for action in actions]
    if parser.epilog:
        parts.append(to_markdown(parser.epilog))
    return "\n\n".join(parts)


def describe_option(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """An option as Sphinx indexes it."""
    invocation = formatter._format_action_invocation(action)
    return f":::{{option}} {invocation}\n{escape(formatter._expand_help(action)) if action.help else ''}\n:::"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("names", Names)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
