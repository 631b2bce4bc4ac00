"""The command line: parse, call one library function, print.

Every verb is a module of its own with `add_options`, which says what it takes, and `run`, which does it. It is imported
when it is used, so that help is quick.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from phasor import __version__
from phasor.cli.interrupts import INTERRUPTED, handle_interrupts
from phasor.cli.parser import Parser, Verb
from phasor.cli.streams import check_output, prepare_streams
from phasor.config.schema import shorten

VERBS = {
    "kinds": "list the choices for a part",
    "explain": "show what a model's positions do, pair by pair",
    "convert": "write a model folder in another format",
    "generate": "continue a prompt with a model folder",
    "train": "train a model with a recipe",
    "extend": "write a model that reads further than it was trained",
    "recipes": "list the recipes in the package, or print one",
    "evaluate": "evaluate a trained model",
    "translate": "translate texts with a trained model",
    "verify": "compare what phasor wrote with its manifests",
    "bench": "time workloads beside other libraries and the limit, or say which path is taken",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 2 for a mistake of the user, explained in one sentence.

    A verb may end in other ways and says so in its help.
    """
    before, warnings.formatwarning = warnings.formatwarning, format_warning
    try:
        with handle_interrupts():
            return run(arguments)
    finally:
        warnings.formatwarning = before


def run(arguments: Sequence[str] | None) -> int:
    prepare_streams()
    parser = build_parser()
    try:
        given = parser.parse_args(arguments)
        check_output(prints=getattr(given, "prints", True))
        if given.command is None:
            parser.print_help()
        else:
            return given.command(given) or 0
    except BrokenPipeError:
        sys.stderr.close()
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        print_error(f"there is not enough memory: {error}")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def format_warning(message: Warning | str, *where: Any, **more: Any) -> str:
    """A warning in one line, without the place in the source."""
    return one_line(f"warning: {message}") + "\n"


def print_error(text: str) -> None:
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    """One line of bounded length, without control characters."""
    line = shorten(" ".join(text.split()))
    return "phasor: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="phasor", description="One Transformer, every part a choice, positions exact at any length.")
    parser.add_argument("--version", action="version", version=f"phasor {__version__}")
    parser.set_defaults(command=None)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Verb)
    for name, line in VERBS.items():
        verbs.add_parser(name, help=line)
    return parser
