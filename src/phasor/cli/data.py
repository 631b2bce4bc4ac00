"""`phasor data preview`: what a model will see of a recipe's data."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from phasor.cli.options import declare_options, given_options
from phasor.cli.parser import Verb
from phasor.cli.recipe_options import add_recipe_options, name_options, without_recipe
from phasor.cli.streams import escape_controls, print_text
from phasor.cli.train import build_recipe
from phasor.config.schema import plural

if TYPE_CHECKING:
    from phasor.training.preview import Preview, ShownText
    from phasor.training.progress import SplitSize

COLOR, PLAIN = "\x1b[32m", "\x1b[0m"  # of trained tokens, in a terminal
OPTIONS = {
    "--rows N": "number of rows to show (4)",
    "--step N": "the step whose batch is shown (0)",
    "--split SPLIT": "train, or valid for what is held out (train)",
}


def add_options(parser: Verb) -> None:
    parser.usage = "%(prog)s preview [RECIPE] [--FIELD VALUE ...] [--rows N] [--step N] [--split SPLIT]"
    parser.description = (
        "Print rows as a model sees them, after templates, masks and packing. What is trained is green in a terminal, "
        "and stands in [[ ]] elsewhere. Nothing is trained, and nothing written but data.cache, where there is one."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = without_recipe()
    parser.allow_abbrev = False
    parser.add_argument("action", choices=["preview"], metavar="preview", help="what to do with the data")
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="as for phasor train")
    declare_options(parser, OPTIONS, default=argparse.SUPPRESS)
    add_recipe_options(parser)


def run(given: argparse.Namespace) -> None:
    from phasor.cli.progress import progress_display
    from phasor.training.preview import preview

    progress = progress_display(given.typed)
    try:
        recipe = build_recipe(given.recipe, given.changes, resume=False)
        shown = preview(recipe, progress=progress, **given_options(given, "rows", "step", "split"))
    except ValueError as error:
        raise ValueError(name_options(str(error), given.typed)) from None
    finally:
        progress.close()
    show(shown)


def show(found: Preview) -> None:
    """Print the counts, and the rows with what is trained marked."""
    from phasor.data.mixture import describe_mixture

    for line in describe_mixture(found.mixture):
        print_text(line)
    for name, size in (("train", found.train), ("valid", found.valid)):
        print(f"{name}: {describe_size(size)}")
    for line in found.left_out:
        print_text(f"left out: {line}")
    print(
        f"step {found.step} of {found.steps_per_epoch:,} in an epoch: {found.rows_of_step:,} rows, "
        f"{found.tokens_of_step:,} places, {found.trained_of_step:,} of them trained"
    )
    for number, row in enumerate(found.rows, 1):
        for text in row:
            print(f"\nrow {number}, {text.name}: {text.tokens:,} tokens, {text.trained:,} of them trained")
            print(show_trained_tokens(text, sys.stdout.isatty(), "NO_COLOR" not in os.environ))


def describe_size(size: SplitSize) -> str:
    return f"{plural(size.examples, 'example')}, {plural(size.tokens, 'token')}"


def show_trained_tokens(text: ShownText, terminal: bool, color: bool) -> str:
    """A text with what is trained in color on a terminal, and in brackets elsewhere.

    >>> from phasor.training.preview import Run, ShownText
    >>> show_trained_tokens(ShownText("document 1", 3, 1, (Run("Hi ", False), Run("you", True))), False, True)
    'Hi [[you]]'
    """
    begin, end = (COLOR, PLAIN) if terminal and color else ("[[", "]]")
    texts = [(escape_controls(run.text) if terminal else run.text, run.trained) for run in text.runs]
    return "".join(f"{begin}{run}{end}" if trained else run for run, trained in texts)
