"""`phasor train`: train a model with a recipe."""

from __future__ import annotations

import argparse
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasor.cli.options import declare_options
from phasor.cli.output import clock, print_json, printable
from phasor.cli.parser import Verb
from phasor.cli.recipe_options import add_recipe_options, name_options, without_recipe
from phasor.cli.streams import print_text
from phasor.config.overrides import apply_overrides
from phasor.config.recipe import DEFAULT, GENERATED, Recipe, read_recipe
from phasor.config.tasks import Task
from phasor.recipes import find
from phasor.torchrun import is_first_process, leave_report

if TYPE_CHECKING:
    from phasor.checkpoints.runs import RunMarker
    from phasor.training import TrainingResult

SAMPLING = "--temperature 0.8 --top-p 0.95"  # the most likely tokens of a small model repeat themselves
ROWS, LONGEST_ROW = 4, 4096  # rows of a batch, and tokens of a row, of a model that is fine-tuned
OPTIONS = {
    "--resume": "continue from the newest whole checkpoint; without RECIPE, the run in --out or the newest one",
    "--overwrite": "start over where --out holds a run: it is deleted when the new one begins",
    "--dry-run": "prepare everything, print what would be trained, and leave nothing",
    "--json": "print the result as JSON",
}
EXIT_CODES = """
exit codes:
  0    finished
  1    diverged: too many steps were skipped, or weights or losses are not finite
  2    a mistake in the command or the recipe, data that cannot be read, or a disk that cannot be written
  130  stopped by Ctrl-C, and saved: --resume continues
  143  stopped by SIGTERM, and saved: --resume continues
"""


def add_options(parser: Verb) -> None:
    parser.usage = "%(prog)s [RECIPE] [--FIELD VALUE ...] [--resume | --overwrite] [--dry-run] [--json]"
    parser.description = "Train a model with a recipe, and write a run folder with checkpoints, metrics and the model."
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
    parser.epilog = f"{without_recipe()}\n{EXIT_CODES}"
    parser.allow_abbrev = False
    parser.set_defaults(prints=False)  # what counts is the run folder
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a recipe in the package (see: phasor recipes), or a YAML or JSON file",
    )
    declare_options(parser, OPTIONS)
    add_recipe_options(parser)


def run(given: argparse.Namespace) -> int:
    try:
        return train_recipe(given)
    except ValueError as error:
        raise ValueError(name_options(str(error), given.typed)) from None


def train_recipe(given: argparse.Namespace) -> int:
    """Train and print the result; returns the exit code. Of several processes the first one prints."""
    try:
        recipe = build_recipe(given.recipe, given.changes, given.resume)
    except (ValueError, OSError):
        if is_first_process():
            raise
        leave_report()

    from phasor.cli.progress import progress_display
    from phasor.training import train

    progress = progress_display(given.typed)
    try:
        result = train(recipe, given.resume, progress, overwrite=given.overwrite, dry_run=given.dry_run)
    except KeyboardInterrupt:
        if is_first_process():
            progress.on_message("stopped at once: --resume continues from what was saved")
        raise
    finally:
        progress.close()
    if not is_first_process():
        return result.exit_code
    if given.json:
        print_json(result)
    elif given.dry_run:
        print_text(f"nothing is written: without --dry-run the run goes to {result.folder}")
    else:
        show(result, recipe)
    return result.exit_code


def build_recipe(recipe: str | None, changes: dict[str, str], resume: bool) -> Recipe:
    """The recipe by its name or file, of the run that is resumed, or the default one, with the changes to it."""
    file = find(recipe) if recipe is not None else None
    if file is None and resume:
        run = run_to_resume(changes)
        base, file = run.recipe, run.folder / "recipe.json"
        changes = changes | {"out": str(run.folder)}
    else:
        base = starting_point(changes) if file is None else read_recipe(file)
    try:
        return Recipe.from_dict(with_own_length(with_own_data(apply_overrides(base, changes), changes), changes))
    except ValueError:
        if file is not None:
            Recipe.from_mapping(base, file)  # a mistake in the file is reported with its name
        raise


def run_to_resume(changes: dict[str, str]) -> RunMarker:
    """The run to resume: that in `out`, or else the newest."""
    from phasor.checkpoints.runs import RunMarker

    if "out" in changes:
        marker = RunMarker.read(Path(changes["out"]))
        if marker is None:
            raise ValueError(f"{changes['out']} holds no run to resume")
        return marker
    markers = (RunMarker.read(path) for path in Path("runs").glob(f"{changes.get('task', '*')}-*"))
    newest = max((marker for marker in markers if marker is not None), key=modified_at, default=None)
    if newest is None:
        raise ValueError("there is no run to resume below runs: give its folder as --out")
    return newest


def modified_at(marker: RunMarker) -> int:
    """When the recipe of a run was written last."""
    file = marker.folder / "recipe.json"
    return (file if file.is_file() else marker.folder).stat().st_mtime_ns


def starting_point(changes: dict[str, str]) -> dict[str, Any]:
    """The default recipe; a model that is loaded brings its parts, tokenizer and length, and takes the default lr."""
    if "init_from" not in changes:
        return DEFAULT.to_dict()
    length = row_length(changes["init_from"])
    return DEFAULT.replace(
        model={},
        data=DEFAULT.data.replace(tokenizer="auto", sequence_length=length),
        train=DEFAULT.train.replace(batch_tokens=max(DEFAULT.train.batch_tokens, ROWS * length)),
        optimizer=Recipe().optimizer,
    ).to_dict()


def row_length(folder: str) -> int:
    """The length of rows to fine-tune a model on: the one it was trained at, within what most devices can train."""
    from phasor.checkpoints.load import read_config
    from phasor.models.extensions import trained_length

    try:
        return min(trained_length(read_config(folder)), LONGEST_ROW)
    except (ValueError, OSError):  # which training reports, once the whole recipe is known
        return DEFAULT.data.sequence_length


def with_own_data(recipe: dict[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """Files that are given take the place of data that a format makes itself."""
    data = recipe.get("data")
    given = changes.keys() & {"data.train", "data.mixture"}
    if not given or "data.format" in changes or not isinstance(data, dict):
        return recipe
    return recipe | {"data": data | {"format": "auto"}} if data.get("format") in GENERATED else recipe


def with_own_length(recipe: dict[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """Steps that are given take the place of epochs, and epochs that of steps."""
    given = [name for name in ("steps", "epochs") if f"train.{name}" in changes]
    train = recipe.get("train")
    if len(given) != 1 or not isinstance(train, dict) or train[given[0]] is None:
        return recipe
    return recipe | {"train": train | {"epochs" if given == ["steps"] else "steps": None}}


def show(result: TrainingResult, recipe: Recipe) -> None:
    """Print the sample, how the run ended, where its files are and what to do next."""
    if result.sample is not None:
        print(f"{printable(result.sample)}\n")
    losses = {"loss": result.loss, "validation loss": result.validation_loss}
    summary = "".join(f", {name} {loss:.3f}" for name, loss in losses.items() if loss is not None)
    if result.best_step not in (None, result.step):
        summary += f" (best {result.best_loss:.3f} at step {result.best_step:,})"
    print(f"{result.status} after {result.step:,} of {result.steps:,} steps in {clock(result.seconds)}{summary}")
    for what, name in (("run", ""), ("model", "model"), ("losses", "loss.png"), ("metrics", "metrics.jsonl")):
        if (result.folder / name).exists():
            print_text(f"{what:<8} {result.folder / name}")
    if result.model_step not in (None, result.step):
        print(f"         of step {result.model_step:,}, which has the lowest validation loss")
    if (result.folder / "events").exists():
        print_text(f"events   tensorboard --logdir {shlex.quote(str(result.folder / 'events'))}")
    print_text(f"next     {next_command(result, recipe)}")


def next_command(result: TrainingResult, recipe: Recipe) -> str:
    """The command to try next."""
    folder = shlex.quote(str(result.folder))
    if result.status != "finished":
        return f"phasor train --resume --out {folder}"
    prompt = "'def '" if recipe.data.format == "python" else "..."
    source = shlex.quote(printable((result.sample or "...").partition("\t")[0]))
    by_task: dict[Task, str] = {
        "lm": f"phasor generate {folder} --prompt {prompt} {SAMPLING}",
        "translation": f"phasor translate {folder} {source}",
        "chat": f"phasor chat {folder}",
    }
    return by_task.get(recipe.task, f"phasor evaluate {folder}")
