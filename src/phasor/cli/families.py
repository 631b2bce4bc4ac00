"""`phasor families`: the checkpoints that phasor reads."""

from __future__ import annotations

import argparse

from phasor.cli.options import declare_options
from phasor.cli.output import print_json, show_table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the checkpoints that phasor reads, by model_type, with their share of downloads."
    missing = "list those that people download and phasor does not read"
    declare_options(parser, {"--missing": missing, "--json": "print JSON"})


def run(given: argparse.Namespace) -> None:
    from phasor.checkpoints.coverage import checkpoint_types, covered_share
    from phasor.models.families import names

    types = checkpoint_types()
    shown = [one for one in types if bool(one.part) != given.missing]
    if given.json:
        print_json([one._asdict() for one in shown])
        return
    rows = [[x.model_type, x.title, f"{x.share:.2%}" if x.share else "", x.part or "nothing"] for x in shown]
    show_table("checkpoints", ["model_type", "family", "share of downloads", "what is read"], rows)
    print(f"{len(names())} families, with text parts {covered_share(types):.1%} of the downloads of text models")
