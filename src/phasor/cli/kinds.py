"""`phasor kinds`: the choices for a part."""

from __future__ import annotations

import argparse

from phasor.cli.output import print_json, show_table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the choices for a part."
    parser.add_argument("group", nargs="?", help="positions, extensions, norms, ...; all groups if left out")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    from phasor.inspect.kinds import GROUPS, describe_kinds

    groups = [given.group] if given.group else list(GROUPS)
    kinds = {group: describe_kinds(group) for group in groups}
    if given.json:
        print_json(kinds[given.group] if given.group else kinds)
        return
    for group, lines in kinds.items():
        show_table(group, ["kind", "what it is"], lines.items())
