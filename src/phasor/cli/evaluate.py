"""`phasor evaluate`: how good a trained model is."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from phasor.cli.options import add_checkpoint
from phasor.cli.output import Bar, print_json

# Further evaluations, each chosen by the option of its name: a module with `add_options(group)` and `run(given)`. The
# first that is given is run; the lengths of a later one may be options of an earlier one.
MODES = {"lengths": "phasor.cli.evaluate_lengths"}
OPTIONAL = argparse.SUPPRESS  # options of modes are absent unless given


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate a trained model on its validation data or on other data: perplexity and bits per byte of a language "
        "model, BLEU and chrF of a translation, accuracy on masked tokens. With --lengths, the loss by length."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="the folder of a run, or with --data a model folder, Hugging Face ones included"
    )
    add_checkpoint(parser)
    parser.add_argument("--data", metavar="FILE", help="evaluate on this instead of the run's validation data")
    parser.add_argument("--target", metavar="FILE", help="the other side of a parallel text in two files")
    parser.add_argument("--num-beams", type=int, default=5, metavar="N", help="number of beams for translation (5)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="evaluate on the first N examples, or rows with --lengths"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU where there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("loss by length")
    group.add_argument("--lengths", metavar="N,N,...", default=OPTIONAL, help="lengths in tokens; 8k is 8,192")
    group.add_argument(
        "--extension",
        metavar="NAME,...",
        default=OPTIONAL,
        help="models to compare: own (as saved, the default), none, linear, ntk, yarn, sinks, ...; a window of the "
        "trained length is always beside them",
    )
    group.add_argument(
        "--factor",
        type=number_or_name,
        metavar="largest|per-length|N",
        default=OPTIONAL,
        help="factor of an extension: one for all lengths, that of the largest (the default), or one per length, or N",
    )
    group.add_argument("--out", metavar="FOLDER", default=OPTIONAL, help="write a report: a page, charts and JSON")
    for module in MODES.values():
        importlib.import_module(module).add_options(group)
    parser.set_defaults(mode_options={action.dest: action.option_strings[0] for action in group._group_actions})


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
    mode = next((module for name, module in MODES.items() if hasattr(given, name)), None)
    if mode is not None:
        if given.target is not None:
            raise ValueError("--target is for translation, which has no loss by length")
        importlib.import_module(mode).run(given)
        return
    for name, option in given.mode_options.items():
        if hasattr(given, name):
            raise ValueError(f"{option} is for {' or '.join(f'--{mode}' for mode in MODES)}")
    evaluate_run(given)


def evaluate_run(given: argparse.Namespace) -> None:
    """Print the metrics of a model."""
    from phasor.evaluation import evaluate

    if given.target is not None and given.data is None:
        raise ValueError("--target needs --data, the other side of the text")
    metrics = evaluate(
        given.model,
        given.data,
        given.target,
        num_beams=given.num_beams,
        limit=given.limit,
        checkpoint=given.checkpoint,
        device=given.device,
        progress=Bar("evaluating"),
    )
    if given.json:
        print_json(metrics)
        return
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name.replace('_', ' '):<{width}}  {format_value(value)}")


def format_value(value: Any) -> str:
    """
    >>> format_value(3.14159265), format_value(120000), format_value("char"), format_value(None)
    ('3.1416', '120,000', 'char', '-')
    """
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
