"""`phasor evaluate MODEL --lengths`: the loss by length, with each extension, beside a window."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from phasor.cli.output import Bar, new_table, print_json, show, show_text
from phasor.cli.streams import print_text

SHARED = ("lengths", "extension", "factor", "out", "data")
OPTIONAL = argparse.SUPPRESS


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--protocol",
        metavar="NAME",
        default=OPTIONAL,
        help="which tokens count: last (the same last tokens of each row at every length, the default), sliding "
        "(windows that overlap) or truncated (windows that do not)",
    )
    group.add_argument(
        "--targets", type=int, metavar="N", default=OPTIONAL, help="last: tokens of a row that count (256)"
    )
    group.add_argument(
        "--stride", type=int, metavar="N", default=OPTIONAL, help="sliding: tokens a window moves by (256)"
    )
    group.add_argument("--join", action="store_true", default=OPTIONAL, help="read all documents end to end as one")


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate_lengths
    from phasor.evaluation.lengths import PAGE
    from phasor.evaluation.lengths_report import (
        describe_factor,
        describe_orders,
        describe_protocol,
        length_name,
        order_lines,
        table_rows,
    )

    for name, protocol in (("targets", "last"), ("stride", "sliding")):
        if hasattr(given, name) and getattr(given, "protocol", "last") != protocol:
            raise ValueError(f"--{name} is for --protocol {protocol}")
    chosen = {name: getattr(given, name) for name in ("protocol", "targets", "stride", "join") if hasattr(given, name)}
    if hasattr(given, "extension"):
        chosen["extensions"] = [name.strip() for name in given.extension.split(",")]
    if hasattr(given, "factor"):
        chosen["factor"] = given.factor
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
        return
    heads = ["model", *map(length_name, result["lengths"])]
    for title, column in (
        ("loss, nats per token", "loss"),
        (f"paired difference to {result['baseline']}", "difference"),
    ):
        rows = table_rows(result, column)
        if rows:
            table = new_table(title, heads)
            for row in rows:
                table.add_row(*map(str, row))
            show(table)
    show_text("orders, lowest loss first", [line.en for line in order_lines(result)])
    how = [describe_orders(result), describe_protocol(result), *describe_factor(result)]
    show_text("how", [*(text.en for text in how), *result["notes"]])
    if hasattr(given, "out"):
        print_text(f"\nreport   {Path(given.out) / PAGE}")
