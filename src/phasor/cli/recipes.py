"""`phasor recipes`: the recipes in the package."""

from __future__ import annotations

import argparse

from phasor.cli.output import print_json
from phasor.recipes import names, read, summary


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--json] | %(prog)s show NAME"
    parser.description = "List the recipes in the package, or print one to start from; `phasor train NAME` runs it."
    parser.add_argument("action", nargs="?", choices=["show"], metavar="show", help="print a recipe")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(given: argparse.Namespace) -> None:
    if given.action is None:
        list_recipes(given.json)
    elif given.name is None:
        raise ValueError(f"show takes the name of a recipe: {', '.join(names())}")
    else:
        print(read(given.name), end="")


def list_recipes(as_json: bool) -> None:
    """Print every recipe with a line about it."""
    recipes = {name: summary(name) for name in names()}
    if as_json:
        print_json(recipes)
        return
    width = max(map(len, recipes), default=0)
    for name, line in recipes.items():
        print(f"{name:<{width}}  {line}")
