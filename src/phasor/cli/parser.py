"""Parsers: errors in one sentence, and options that are added when their command is used."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

VALUES = {  # what an option takes, by the function that reads it
    "int": "an integer",
    "integer": "an integer",
    "float": "a number",
    "number": "a number",
    "numbers": "numbers between commas",
    "one_or_numbers": "a number, or several between commas",
    "sequences": "integers between commas, with semicolons between sequences",
    "words": "token ids and texts between commas, with escapes as in Python",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, like all others."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message, re.DOTALL)
        if wrong and wrong[2] in VALUES:
            message = f"{wrong[1]} must be {VALUES[wrong[2]]}, not {wrong[3]}"
        raise ValueError(f"{message}; see {self.prog} --help")


class Verb(Parser):
    """The parser of one command, which adds its options when it parses."""

    prefix: str | None = None
    action: type[argparse.Action]

    def accept_prefix(self, prefix: str, action: type[argparse.Action]) -> None:
        """Have every unknown option with this prefix be read by an action."""
        self.prefix, self.action = prefix, action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        verb = importlib.import_module(f"phasor.cli.{self.prog.split()[-1]}")
        verb.add_options(self)
        self.set_defaults(command=verb.run)
        for arg in args:
            if arg.endswith("=--") and arg.startswith("--"):  # argparse would take it for no value at all
                self.error(f"{arg[:-3]} does not take '--'")
        known = self._option_string_actions
        for name in dict.fromkeys(arg.partition("=")[0] for arg in args):
            if self.prefix is not None and name.startswith(self.prefix) and name not in known:
                self.add_argument(name, action=self.action, help=argparse.SUPPRESS)
        given, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}{self.nearest(others)}")
        return given, others

    def nearest(self, others: Sequence[str]) -> str:
        """A hint at the known option that is nearest to an unknown one."""
        from phasor.config.schema import did_you_mean

        meant = next((other.partition("=")[0] for other in others if other.startswith("--")), None)
        return "" if meant is None else did_you_mean(meant, self._option_string_actions)
