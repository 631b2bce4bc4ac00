"""`phasor merge`: an adapter in the weights of its base."""

from __future__ import annotations

import argparse

from phasor.cli.options import ON_HUB, chosen_adapters
from phasor.cli.output import Bar
from phasor.cli.streams import print_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the model that a base is with an adapter, in the base's format."
    parser.add_argument("base", help=f"the model that the adapter is for: a folder, or {ON_HUB}")
    parser.add_argument(
        "adapter",
        nargs="+",
        metavar="ADAPTER",
        help="a run that trained an adapter, or an adapter's folder of phasor or PEFT, perhaps with a weight "
        "(FOLDER=0.5); several add up",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write; a model folder that phasor wrote is replaced")


def run(given: argparse.Namespace) -> None:
    from phasor.checkpoints import merge

    merge(given.base, chosen_adapters(given.adapter) or {}, given.out, progress=Bar("reading"))
    print_text(f"written: {given.out}")
