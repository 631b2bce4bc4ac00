"""`phasor evaluate MODEL --retrieval`: what a model finds in long prompts, by length and depth."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from phasor.cli.options import given_options
from phasor.cli.output import Bar, print_json, show_table, show_text
from phasor.cli.streams import print_text

SHARED = ("lengths", "extension", "out")
OPTIONS = {
    "--retrieval TASK,...": "what is found in prompts of --lengths tokens, by its depth: passkey, needle, multikey, "
    "variables, recall",
    "--depths N": "retrieval: number of depths (5)",
    "--trials N": "retrieval: prompts of a cell (10)",
    "--haystack FILE": "retrieval: text or tokens to hide needles in, instead of a few sentences that are repeated",
    "--seed N": "retrieval: seed of the prompts (0)",
}


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate_retrieval
    from phasor.evaluation.lengths_report import length_name
    from phasor.evaluation.retrieval.evaluate import PAGE
    from phasor.evaluation.retrieval.heat_map import depth_rows, describe_map, length_rows, model_name

    if not hasattr(given, "lengths"):
        raise ValueError("--retrieval needs --lengths, the tokens that prompts have, such as --lengths 1k,2k,4k")
    if given.limit is not None:
        raise ValueError("--limit does not go with --retrieval: the number of prompts is --trials")
    chosen = given_options(given, "depths", "trials", "haystack", "seed")
    if hasattr(given, "extension"):
        chosen["extensions"] = given.extension
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
        **chosen,
    )
    if given.json:
        print_json(result)
        return
    lengths = [length_name(length) for length in result["lengths"]]
    print("exact match (mean log-probability of the answer, in nats), by depth and length\n")
    for task, summary in result["tasks"].items():
        for name in result["extensions"]:
            show_table(f"{task}, {model_name(result, name)}", ["depth", *lengths], depth_rows(result, task, name))
        show_table(f"{task}: {summary}; all depths", ["model", *lengths], length_rows(result, task))
    show_text("how", [*describe_map(result).en.replace(". ", ".\n").splitlines(), *result["notes"]])
    if hasattr(given, "out"):
        print_text(f"\nreport   {Path(given.out) / PAGE}")
