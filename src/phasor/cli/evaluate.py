"""`phasor evaluate`: how good a trained model is."""

from __future__ import annotations

import argparse
from typing import Any

from phasor.cli.options import add_checkpoint
from phasor.cli.output import Bar, print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate a trained model on its validation data or on other data: perplexity and bits per byte of a language "
        "model, BLEU and chrF of a translation, accuracy on masked tokens."
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or with --data a model folder")
    add_checkpoint(parser)
    parser.add_argument("--data", metavar="FILE", help="evaluate on this instead of the run's validation data")
    parser.add_argument("--target", metavar="FILE", help="the other side of a parallel text in two files")
    parser.add_argument("--num-beams", type=int, default=5, metavar="N", help="number of beams for translation (5)")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate on the first N examples")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU where there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate

    if given.target is not None and given.data is None:
        raise ValueError("--target needs --data, the other side of the text")
    metrics = evaluate(
        given.run,
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
