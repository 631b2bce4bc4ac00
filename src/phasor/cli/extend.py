"""`phasor extend`: a model that reads further than it was trained."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from phasor.cli.options import (
    ON_HUB,
    add_checkpoint,
    add_extension_fields,
    choose_weights,
    declare_options,
    given_fields,
    given_options,
)
from phasor.cli.output import Bar, print_json
from phasor.cli.streams import print_text
from phasor.config import Extension

if TYPE_CHECKING:
    from phasor.training import Extended

METHODS = {
    "linear": "divide every frequency (position interpolation)",
    "ntk": "a greater base",
    "yarn": "divide slow frequencies, and sharpen the softmax",
    "longrope": "a divisor for each pair, by --short-factor and --long-factor, or else those of YaRN's ramp",
    "drop": "no positions at all, of use after training alone (--train)",
}
TUNING = {
    "--train FILE": "a text, or a folder of texts, to fine-tune on",
    "--valid FILE": "a text to validate with; held out from --train if left out",
    "--run FOLDER": "where the run is kept (DESTINATION-run)",
}
NUMBERS = {
    "--steps N": "optimizer steps (400)",
    "--lr X": "learning rate (2e-5)",
    "--batch-tokens N": "tokens per step (16,384, and at least one row)",
    "--seed N": "of the order of the texts and of skipped positions (0)",
}
EPILOG = """
A run that was stopped is resumed by the same command. Exit codes are those of phasor train.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model folder whose configuration reads further than the model was trained, after short fine-tuning "
        "where --train is given. Without it every weight is as it was."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "model",
        help=f"a model folder of phasor's or Hugging Face's, a run, or {ON_HUB}",
    )
    add_checkpoint(parser)
    parser.add_argument("destination", help="the folder to write, which is new")
    parser.add_argument(
        "--to", required=True, metavar="TOKENS", help="the length that the model is to read, such as 131072 or 128k"
    )
    methods = "; ".join(f"{name}: {line}" for name, line in METHODS.items())
    parser.add_argument("--method", default="yarn", metavar="METHOD", help=f"{methods} (yarn)")
    declare_options(parser, {"--format FORMAT": "phasor or hf; by default that of the model", "--json": "print JSON"})
    training = parser.add_argument_group("fine-tuning")
    declare_options(training, TUNING)
    declare_options(training, NUMBERS, default=argparse.SUPPRESS)
    training.add_argument(
        "--positions",
        default="ordinary",
        metavar="ordinary|skipped",
        help="rows of --to tokens, or rows of the trained length that skip positions below --to (PoSE) (ordinary)",
    )
    training.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, ...; auto is a GPU where there is one"
    )
    add_extension_fields(parser, extended_by())


def extended_by() -> list[type[Any]]:
    """The extensions among the methods."""
    return [cls for kind, cls in Extension.kinds.items() if kind in METHODS]


def run(given: argparse.Namespace) -> int:
    from phasor.cli.progress import progress_display
    from phasor.models.extensions import parse_length
    from phasor.training import extend

    numbers = given_options(given, "steps", "lr", "batch_tokens", "seed")
    if given.train is None and (numbers or given.valid or given.run):
        first = next(iter(numbers), "valid" if given.valid else "run").replace("_", "-")
        raise ValueError(f"--{first} is for fine-tuning: add --train FILE")
    progress = progress_display()
    try:
        result = extend(
            choose_weights(given.model, given.checkpoint),
            given.destination,
            to=parse_length(given.to),
            method=given.method,
            train=given.train,
            valid=given.valid,
            positions=given.positions,
            format=given.format,
            run=given.run,
            device=given.device,
            progress=progress,
            saving=Bar,
            **numbers,
            **given_fields(given, *extended_by()),
        )
    finally:
        if given.train is not None:
            progress.close()
    if given.json:
        print_json(result)
    else:
        show(result)
    return result.exit_code


def show(result: Extended) -> None:
    """Print what was written, or how the run goes on."""
    if result.status != "finished":
        print(f"{result.status}: nothing is written yet; the run is in {result.run}, and the same command resumes it")
        return
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    print_text(f"written: {result.destination}")
    print(
        f"{result.method} from {result.original_length:,} to {result.max_length:,} tokens, "
        f"trained at {result.trained_length:,}{loss}"
    )
    if result.run is not None:
        print(f"the run is kept in {result.run}")
    print_text(f"next     phasor explain {shlex.quote(str(result.destination))}")
