"""`phasor evaluate MODEL --lengths`: the loss by length, with each extension, beside a window."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from phasor.cli.options import given_options
from phasor.cli.output import Bar, check_loss, print_json, show_table, show_text
from phasor.cli.streams import print_text

SHARED = ("lengths", "extension", "factor", "out", "data")
OPTIONS = {
    "--protocol NAME": "which tokens count: last (the same last tokens of each row at every length, the default), "
    "sliding (windows that overlap) or truncated (windows that do not)",
    "--targets N": "last: tokens of a row that count (256)",
    "--stride N": "sliding: tokens a window moves by (256)",
    "--join": "read all documents end to end as one",
}


def number_or_name(text: str) -> float | str:
    """
    >>> number_or_name("8"), number_or_name("per-length")
    (8.0, 'per-length')
    """
    try:
        return float(text)
    except ValueError:
        return text


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate_lengths

    for name, protocol in (("targets", "last"), ("stride", "sliding")):
        if hasattr(given, name) and getattr(given, "protocol", "last") != protocol:
            raise ValueError(f"--{name} is for --protocol {protocol}")
    chosen = given_options(given, "protocol", "targets", "stride", "join")
    if hasattr(given, "factor"):
        chosen["factor"] = number_or_name(given.factor)
    if hasattr(given, "extension"):
        chosen["extensions"] = [name.strip() for name in given.extension.split(",")]
    result = evaluate_lengths(
        given.model,
        given.data,
        lengths=given.lengths,
        limit=given.limit,
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
    else:
        show(given, result)
    for row in result["rows"]:
        if row["extension"] == result["baseline"]:
            check_loss(row["loss"]["estimate"])


def show(given: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the losses, their differences, which orders are shown, and how they were measured."""
    from phasor.evaluation.lengths import PAGE
    from phasor.evaluation.lengths_report import (
        describe_factor,
        describe_orders,
        describe_protocol,
        length_name,
        order_lines,
        table_rows,
    )

    heads = ["model", *map(length_name, result["lengths"])]
    for title, column in (
        ("loss, nats per token", "loss"),
        (f"paired difference to {result['baseline']}", "difference"),
    ):
        rows = table_rows(result, column)
        if rows:
            show_table(title, heads, rows)
    show_text("orders, lowest loss first", [line.en for line in order_lines(result)])
    how = [describe_orders(result), describe_protocol(result), *describe_factor(result)]
    show_text("how", [*(text.en for text in how), *result["notes"]])
    if hasattr(given, "out"):
        print_text(f"\nreport   {Path(given.out) / PAGE}")
