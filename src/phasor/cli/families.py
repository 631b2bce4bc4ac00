"""`phasor families`: the checkpoints that phasor reads."""

from __future__ import annotations

import argparse

from phasor.cli.output import new_table, print_json, show


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the checkpoints that phasor reads, by model_type, with their share of downloads."
    parser.add_argument(
        "--missing", action="store_true", help="list those that people download and phasor does not read"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    from phasor.checkpoints.coverage import checkpoint_types, covered_share
    from phasor.models.families import names

    types = checkpoint_types()
    shown = [one for one in types if bool(one.part) != given.missing]
    if given.json:
        print_json([one._asdict() for one in shown])
        return
    table = new_table("checkpoints", ["model_type", "family", "share of downloads", "what is read"])
    for one in shown:
        table.add_row(one.model_type, one.title, f"{one.share:.2%}" if one.share else "", one.part or "nothing")
    show(table)
    print(f"{len(names())} families, with text parts {covered_share(types):.1%} of the downloads of text models")
