"""The command line: parse, call one library function, print.

Every command is a module with `add_options`, which declares its options, and `run`, which runs it. It is imported when
the command is used, so that help is quick.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phasor.cli.interrupts import INTERRUPTED, handle_interrupts
from phasor.cli.output import Bar
from phasor.cli.parser import Parser, Verb
from phasor.cli.streams import check_output, prepare_streams
from phasor.distribution import __version__
from phasor.progress import shown_progress
from phasor.torchrun import is_first_process, leave_report

VERBS = {
    "generate": "continue a prompt with a model folder",
    "chat": "talk with a model in the terminal",
    "serve": "answer many clients over HTTP",
    "recipes": "list the recipes in the package, or print one",
    "data": "show what a model will see of a recipe's data",
    "train": "train a model with a recipe",
    "evaluate": "evaluate a trained model",
    "translate": "translate texts with a trained model",
    "convert": "write a model folder in another format",
    "merge": "merge an adapter into the weights of its base",
    "extend": "write a model that reads further than it was trained",
    "lab": "open a local page on which positions become visible",
    "explain": "show what a model's positions do, pair by pair",
    "kinds": "list the choices for a part",
    "families": "list the checkpoints that are read, by their share of downloads",
    "compare": "compare position schemes beyond the length they are trained at",
    "plan": "plan training on many devices: mesh, memory, exchange, step time",
    "bench": "time workloads beside other libraries and the limit, or say which path is taken",
    "verify": "compare what phasor wrote with its manifests",
    "doctor": "test this installation, and say what it has",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 2 for a mistake of the user, explained in one sentence.

    A command may have other exit codes, which its help lists.
    """
    before, warnings.formatwarning = warnings.formatwarning, format_warning
    try:
        with handle_interrupts(), show_progress():
            return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        warnings.formatwarning = before


@contextmanager
def show_progress() -> Iterator[None]:
    """Have the first of several processes show what takes long unasked, such as fetching a model."""
    token = shown_progress.set(Bar if is_first_process() else None)
    try:
        yield
    finally:
        shown_progress.reset(token)


def run(arguments: Sequence[str] | None) -> int:
    prepare_streams()
    parser = build_parser()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = parse(parser, typed)
        check_output(prints=getattr(given, "prints", True))
        if given.command is None:
            parser.print_help()
        else:
            return given.command(given) or 0
    except BrokenPipeError:
        sys.stderr.close()
    except (ValueError, OSError) as error:
        print_error(name_options(describe_error(error), typed))
        return 2
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        print_error(f"there is not enough memory: {error}")
        return 2
    return 0


def parse(parser: argparse.ArgumentParser, typed: list[str]) -> argparse.Namespace:
    """The options of a command; of several processes the first one reports a mistake in them."""
    try:
        return parser.parse_args(typed, argparse.Namespace(typed=typed))
    except ValueError:
        if is_first_process():
            raise
        leave_report()


def describe_error(error: Exception) -> str:
    """The message of an error; for one of the operating system its file and the reason, without the number.

    >>> describe_error(PermissionError(13, "Permission denied", "run/model"))
    'run/model: Permission denied'
    """
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    # What phasor writes has its name in the error: on a full disk without one is what it prints.
    where = "standard output" if error.filename is None and error.errno == errno.ENOSPC else error.filename
    return error.strerror if where is None else f"{os.fsdecode(where)}: {error.strerror}"


def name_options(message: str, arguments: Sequence[str]) -> str:
    """An error message with the fields that were given as options under the names that were typed.

    >>> name_options("GenerationConfig.top_k must be an integer, not 1.5", ["generate", "m", "--top-k", "1.5"])
    '--top-k must be an integer, not 1.5'
    """
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    typed = {option.removeprefix("--").replace("-", "_"): option for option in options}

    def option(match: re.Match[str]) -> str:
        record, name = match.groups()
        is_field = record is not None or "_" in name or match.start() == 0
        return typed[name] if name in typed and is_field else match.group()

    return re.sub(r"(?<![\w./'-])([A-Z]\w*\.)?(\w+)\b(?![\w./'=])", option, message)


def format_warning(message: Warning | str, *where: Any, **more: Any) -> str:
    """A warning in one line, without the place in the source."""
    return one_line(f"warning: {message}") + "\n"


def print_error(text: str) -> None:
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    """One line of bounded length, without control characters."""
    from phasor.config.schema import shorten

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
