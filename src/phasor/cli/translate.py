"""`phasor translate`: translate texts, one per line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phasor.artifacts import refuse_artifact_file
from phasor.cli.options import ON_HUB, declare_options
from phasor.cli.output import Bar, print_json
from phasor.cli.parallel import add_mesh, from_first, join_command, processes_argument
from phasor.cli.streams import check_argument, print_text, read_lines
from phasor.files import atomic_write

if TYPE_CHECKING:
    from phasor.parallel.processes import JoinedProcesses

OPTIONS = {
    "--file FILE": "texts, one per line, gzipped or not; - is standard input",
    "--out FILE": "write the translations here instead of printing them",
    "--num-beams N": "number of beams (the folder's setting, or 4)",
    "--length-penalty X": "exponent of the length that divides a score (the folder's setting, or 1)",
    "--max-new-tokens N": "maximum number of tokens of a translation",
    "--json": "write JSON: source and translation of every text",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Translate texts with a trained model, one per line, from arguments, a file or standard input."
    parser.add_argument(
        "run",
        metavar="RUN",
        help=f"the folder of a run, a model folder, or {ON_HUB}",
    )
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="a text to translate")
    declare_options(parser, OPTIONS)
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, metavar="N", help="maximum number of tokens per batch (4096)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU where there is one")
    add_mesh(parser)


def run(given: argparse.Namespace) -> None:
    with join_command(given) as processes:
        texts = from_first(processes, lambda: read_texts(given))
        translations = run_translation(texts, given, processes)
        if processes is None or processes.is_first:
            write_translations(texts, translations, given)


def read_texts(given: argparse.Namespace) -> list[str]:
    """The texts to translate, from the command line, a file or standard input."""
    if given.texts and given.file is not None:
        raise ValueError("give texts or --file, not both")
    check_destination(given.out, given.run)
    return [check_argument(text, "TEXT") for text in given.texts] or read_lines(
        given.file or "-", "the texts, one per line"
    )


def write_translations(texts: list[str], translations: list[str], given: argparse.Namespace) -> None:
    """Print the translations, or write them to the file that was named."""
    with destination(given.out) as file:
        if given.json:
            pairs = [{"source": s, "translation": t} for s, t in zip(texts, translations, strict=True)]
            print_json(pairs, file=file)
        else:
            for translation in translations:
                print_text(" ".join(translation.splitlines()), file=file)


def run_translation(texts: list[str], given: argparse.Namespace, processes: JoinedProcesses | None) -> list[str]:
    """The translation of every text; that of an empty one is empty."""
    from phasor.evaluation import translate

    return translate(
        given.run,
        texts,
        num_beams=given.num_beams,
        length_penalty=given.length_penalty,
        max_new_tokens=given.max_new_tokens,
        batch_tokens=given.batch_tokens,
        device=given.device,
        progress=Bar("translating"),
        **processes_argument(processes),
    )


def check_destination(name: str | None, run: str) -> None:
    """Refuse a destination that cannot be written to, or is part of a model, before translating."""
    if name is not None and Path(name).is_file():
        refuse_artifact_file(Path(name))
        if Path(name).resolve().is_relative_to(Path(run).resolve()):
            raise ValueError(f"{name} is part of {run}, and is not replaced: name another file")
    if name is not None and Path(name).is_dir():
        raise ValueError(f"{name} cannot be written: it is a folder")
    if name is not None and not os.access(Path(name).parent, os.W_OK):
        there = Path(name).parent.is_dir()
        raise ValueError(f"{name} cannot be written: {Path(name).parent} {'is read-only' if there else 'is no folder'}")


@contextmanager
def destination(name: str | None) -> Iterator[TextIO]:
    """Standard output, a file that appears under its name when it is complete, or a pipe or device as it is."""
    if name is None:
        yield sys.stdout
        return
    path = Path(name).resolve()
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    with ExitStack() as stack:
        staged = stack.enter_context(atomic_write(path, unique=True))
        try:
            file = stack.enter_context(staged.open("w", encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        yield file
