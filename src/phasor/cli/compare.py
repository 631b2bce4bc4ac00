"""`phasor compare`: the same decoder with each position scheme, measured beyond the length it was trained at."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from phasor.cli.options import declare_options, given_options
from phasor.cli.output import Bar, print_json, show_table, show_text
from phasor.cli.streams import print_text

OPTIONS = {
    "--schemes NAME,...": "position schemes (phasor kinds positions), or all; gated-delta, retention, mamba2, "
    "short-convolution or rotary+retention; on a task also NAME:randomized, NAME:coupled "
    "(none,sinusoidal,t5,alibi,rotary)",
    "--question NAME": "subspaces, base or decay: variants of rotary, not --schemes",
    "--task NAME": "copy, reverse, addition, sort, parity or recall, not texts",
    "--data FILE": "texts to train on (the sources of Python's standard library)",
    "--valid FILE": "texts to measure on; held out if left out",
    "--length LENGTH": "tokens of a text, or items of a problem, that are trained on "
    "(small: 64 or 6, large: 512 or 20)",
    "--seeds N": "how often each is trained (1)",
    "--steps N": "optimizer steps of each run (small: 500, of a task 2000, of addition 1200; large: 1500, 10000, 5000)",
    "--size small|large": "of the model and its training (large on a GPU)",
    "--protocol NAME": "which tokens count: last (the default), sliding, truncated",
    "--rows N": "rows or problems that are measured (small: 64 or 200, large: 400 or 1000)",
    "--join": "measure all documents end to end as one",
    "--tokenizer NAME": "bpe, unigram, bytes or a folder (texts: bpe, tasks: bytes)",
}
EPILOG = """
The same command goes on with a comparison that was stopped; more schemes or seeds are added to it. Exit codes are those
of phasor train.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the same small decoder with each position scheme, on the same data in the same order, and measure it "
        "beyond the length it was trained at: the loss of texts to 16 times the length, or exact answers to problems "
        "of a task to 4 times their size."
    )
    parser.epilog = EPILOG
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the folder for the runs and the report")
    declare_options(parser, OPTIONS, default=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU where there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def given_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a comparison that were given."""
    return given_options(given, *(typed.split()[0].removeprefix("--") for typed in OPTIONS))


def run(given: argparse.Namespace) -> int:
    from phasor.cli.progress import progress_display
    from phasor.evaluation.compare import compare
    from phasor.evaluation.compare.comparison import StoppedError

    chosen = given_settings(given)
    chosen |= {"device": given.device, "command": shlex.join(["phasor", *given.typed]), "evaluating": Bar}
    progress = progress_display()
    try:
        result = compare(given.out, progress=progress, **chosen)
    except StoppedError as stopped:
        print(stopped)
        return stopped.exit_code
    finally:
        progress.close()
    if given.json:
        print_json(result)
    else:
        print_result(result, Path(given.out))
    return 0


def print_result(result: dict[str, Any], out: Path) -> None:
    """Print tables and orders, and where the report is."""
    from phasor.evaluation.lengths_report import describe_orders

    if "task" in result:
        print_task(result)
    else:
        print_losses(result)
    show_text("how", [describe_orders(result).en, *result.get("notes", [])])
    print_text(f"\nreport   {out / 'compare.html'}")


def print_losses(result: dict[str, Any]) -> None:
    from phasor.evaluation.compare.report import spread_rows
    from phasor.evaluation.lengths_report import (
        describe_factor,
        describe_protocol,
        length_name,
        order_lines,
        table_rows,
    )

    heads = ["model", *map(length_name, result["lengths"])]
    show_table("loss, nats per token", heads, table_rows(result, "loss"))
    if result["seeds"] > 1:
        show_table("lowest and highest mean of a seed", heads, spread_rows(result))
    show_text("orders, lowest loss first", [line.en for line in order_lines(result)])
    if result["extension_orders"]:
        lines = order_lines(result | {"orders": result["extension_orders"]})
        show_text(f"{result['extended']} with each extension", [line.en for line in lines])
    show_text("measured", [text.en for text in (describe_protocol(result), *describe_factor(result))])


def print_task(result: dict[str, Any]) -> None:
    from phasor.evaluation.compare.report import exact_rows
    from phasor.evaluation.lengths_report import order_lines

    heads = ["scheme", *(f"{size} {result['item']}s" for size in result["lengths"])]
    title = f"{result['task']}, exact answers, trained to {result['trained_size']} {result['item']}s"
    show_table(title, heads, exact_rows(result))
    show_text("orders, fewest wrong answers first", [line.en for line in order_lines(result)])
