"""`phasor evaluate MODEL --retrieval`: what a model finds in long prompts, by length and depth."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from phasor.cli.output import Bar, new_table, print_json, show, show_text
from phasor.cli.streams import print_text

SHARED = ("lengths", "extension", "out")
OPTIONAL = argparse.SUPPRESS


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retrieval",
        metavar="TASK,...",
        default=OPTIONAL,
        help="what is found in prompts of --lengths tokens, by its depth: passkey, needle, multikey, variables, recall",
    )
    group.add_argument("--depths", type=int, metavar="N", default=OPTIONAL, help="retrieval: number of depths (5)")
    group.add_argument("--trials", type=int, metavar="N", default=OPTIONAL, help="retrieval: prompts of a cell (10)")
    group.add_argument(
        "--haystack",
        metavar="FILE",
        default=OPTIONAL,
        help="retrieval: text or tokens to hide needles in, instead of a few sentences that are repeated",
    )
    group.add_argument("--seed", type=int, metavar="N", default=OPTIONAL, help="retrieval: seed of the prompts (0)")


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate_retrieval
    from phasor.evaluation.lengths_report import length_name
    from phasor.evaluation.retrieval.evaluate import PAGE
    from phasor.evaluation.retrieval.heat_map import depth_rows, describe_map, length_rows, model_name

    if not hasattr(given, "lengths"):
        raise ValueError("--retrieval needs --lengths, the tokens that prompts have, such as --lengths 1k,2k,4k")
    if given.limit is not None:
        raise ValueError("--limit does not go with --retrieval: the number of prompts is --trials")
    names = {"depths": "depths", "trials": "trials", "haystack": "haystack", "seed": "seed", "extension": "extensions"}
    result = evaluate_retrieval(
        given.model,
        given.retrieval,
        lengths=given.lengths,
        checkpoint=given.checkpoint,
        part=given.part,
        device=given.device,
        out=getattr(given, "out", None),
        command=shlex.join(["phasor", *given.typed]),
        progress=Bar("evaluating"),
        **{new: getattr(given, name) for name, new in names.items() if hasattr(given, name)},
    )
    if given.json:
        print_json(result)
        return
    lengths = [length_name(length) for length in result["lengths"]]
    print("exact match (mean log-probability of the answer, in nats), by depth and length\n")
    for task, summary in result["tasks"].items():
        for name in result["extensions"]:
            table = new_table(f"{task}, {model_name(result, name)}", ["depth", *lengths])
            for row in depth_rows(result, task, name):
                table.add_row(*row)
            show(table)
        table = new_table(f"{task}: {summary}; all depths", ["model", *lengths])
        for cells in length_rows(result, task):
            table.add_row(*map(str, cells))
        show(table)
    show_text("how", [*describe_map(result).en.replace(". ", ".\n").splitlines(), *result["notes"]])
    if hasattr(given, "out"):
        print_text(f"\nreport   {Path(given.out) / PAGE}")
