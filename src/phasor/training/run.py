"""The folder of a run: the recipe as run, metrics, TensorBoard events, checkpoints, samples, a plot and the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phasor.adapters import DEFAULT
from phasor.artifacts import LOCK, ArtifactFolder
from phasor.checkpoints import save
from phasor.checkpoints.adapter_folder import write_adapter
from phasor.checkpoints.folder import listed_files, model_folder, unreplaceable_reason, write_tokenizers
from phasor.checkpoints.hf import Origin
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.native import save_native
from phasor.checkpoints.runs import (
    CHECKPOINTS,
    DATA,
    MARKER,
    MODEL,
    RECIPE,
    REFERENCE,
    TOKENIZER_FOLDER,
    RunMarker,
    entries,
    is_marker_part,
)
from phasor.checkpoints.tensors import TensorSource, fingerprint_model
from phasor.config.recipe import LoggerName, Recipe
from phasor.config.schema import name_some
from phasor.files import remove, write_errors
from phasor.manifest import MANIFEST, DamagedError, files_below
from phasor.training.loggers.base import LoggedRun
from phasor.training.loggers.guarded import GuardedLoggers
from phasor.training.loggers.tensorboard import EVENTS
from phasor.training.loggers.wandb import WANDB
from phasor.training.state import Notify, describe_changes, remove_checkpoints
from phasor.transformer import Transformer

RUNS = Path("runs")
METRICS, SAMPLES, PLOT = "metrics.jsonl", "samples.txt", "loss.png"
FILES = (LOCK, RECIPE, METRICS, SAMPLES, PLOT, MANIFEST)
FOLDERS = (DATA, TOKENIZER_FOLDER, REFERENCE, CHECKPOINTS, EVENTS, WANDB, MODEL)
LOGGER_FOLDERS: dict[LoggerName, str] = {"tensorboard": EVENTS, "wandb": WANDB}
FIRST_NAMES = (DATA, TOKENIZER_FOLDER, REFERENCE, RECIPE, LOCK)  # what there may be before the first step


def choose_run_folder(recipe: Recipe, resume: bool) -> Path:
    """Where a run goes: `out`, or a numbered folder below `runs`, the last one to resume or the next one."""
    if recipe.out is not None:
        return Path(recipe.out)
    numbers = [int(n) for n in (p.name.removeprefix(f"{recipe.task}-") for p in RUNS.glob(f"{recipe.task}-*"))
               if n.isdecimal()]  # fmt: skip
    last = max(numbers, default=0)
    return RUNS / f"{recipe.task}-{last if resume and last else last + 1}"


class RunFolder:
    """The folder while a run writes to it; one process at a time.

    The folder is new, empty, or one that a run has written. Other files in it stay as they are.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunFolder(Path(folder), Recipe(), resume=False) as run:
    ...     run.start(0)
    ...     run.log(10, loss=2.5)
    ...     run.metrics()
    [{'step': 10, 'loss': 2.5}]
    """

    def __init__(
        self, folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool = False, notify: Notify = print
    ) -> None:
        self.path, self.recipe, self.notify = folder, recipe, notify
        self.artifact = ArtifactFolder(folder, "run")
        self.resume, self.overwrite = resume, overwrite
        self.checkpoints, self.events = folder / CHECKPOINTS, folder / EVENTS
        self.metrics_file, self.recipe_file = folder / METRICS, folder / RECIPE
        self.metrics_stream: Any = None
        self.loggers = GuardedLoggers((), lambda message: self.notify(message))
        self.held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        found = self.check_folder()
        if found is not None:
            self.check_contents(found)
        self.created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.marker = RunMarker.create(self.path, self.recipe, [LOCK]) if found is None else found
            self.marker.claim(LOCK)
            self.lock = self.held.enter_context(self.artifact.lock(f"another process is training in {self.path}"))
        if found is not None:  # another process may have trained here until now
            self.marker = RunMarker.read(self.path) or found
        self.names_before = None if found is None else dict(self.marker.names)
        self.recipe_before, self.manifest_before = (
            file.read_bytes() if file.is_file() else None for file in (self.recipe_file, self.path / MANIFEST)
        )
        self.remove_leftovers()
        if not self.resume or self.recipe_before is None:  # so that a run killed before its first step is resumed
            self.write_recipe()
        return self

    def check_folder(self) -> RunMarker | None:
        """The marker of a run that is there already; refuses a folder that is somebody else's, or the wrong one."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and a run needs a folder")
        marker = RunMarker.read(self.path)
        if marker is None:
            if names := entries(self.path):
                raise ValueError(
                    f"{self.path} was not written by phasor train and is left alone: "
                    f"give a new or empty folder (it holds {name_some(names, 5)})"
                )
            if self.resume:
                raise ValueError(f"{self.path} holds no run to resume")
        elif not self.resume and not self.overwrite and self.has_begun():
            raise ValueError(f"{self.path} holds a run already: resume or overwrite it, or give another folder as out")
        return marker

    def has_begun(self) -> bool:
        """Whether there is anything that a run has trained."""
        names = (self.path / MODEL, self.metrics_file)
        return any(os.path.lexists(path) for path in names) or bool(entries(self.checkpoints))

    def check_contents(self, marker: RunMarker) -> None:
        """Refuse a folder in which something under the names of a run was not written by one."""
        for name in (*FILES, *FOLDERS):
            path, linked = self.path / name, (self.path / name).is_symlink()
            wanted = path.is_file() if name in FILES else path.is_dir() or linked
            if not marker.owns(name) or (os.path.lexists(path) and not wanted):
                raise ValueError(f"{path} was not written by this run: move it away")
        entries(self.checkpoints)  # an error where it cannot be read
        recipes = [json.dumps(each["recipe"], sort_keys=True) for each in marker.recipes]
        if self.resume and self.recipe_file.exists() and self.recipe_text() not in recipes:
            raise ValueError(
                f"{self.recipe_file} was changed after it was written ({MARKER} has it as it was): "
                "give changes as options"
            )
        model = self.path / MODEL
        if model.exists() and (why := unreplaceable_reason(model)) is not None:
            raise ValueError(f"{model} {why}")
        inside = [] if self.recipe.init_from is None else [Path(self.recipe.init_from)]
        if self.overwrite and any(path.resolve().is_relative_to(self.path.resolve()) for path in inside):
            raise ValueError(f"{inside[0]} is part of the run in {self.path} that would be overwritten")

    def recipe_text(self) -> str | None:
        """The recipe in recipe.json, as text that can be compared; None where it is not JSON."""
        try:
            return json.dumps(json.loads(self.recipe_file.read_bytes()), sort_keys=True)
        except (ValueError, RecursionError):
            return None

    def write_token(self) -> str:
        """Write something to the lock that nobody has written before, by which other processes know the folder."""
        token = secrets.token_hex(16)
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, token.encode(), 0)
        os.fsync(self.lock)
        return token

    def read_token(self) -> str | None:
        """What the process that holds the lock has written to it."""
        try:
            return (self.path / LOCK).read_text(encoding="utf-8")
        except OSError:
            return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.metrics_stream is not None:
            self.loggers.finish()
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            if self.metrics_stream is not None:
                self.metrics_stream.close()
        if isinstance(error, Exception) and self.metrics_stream is None:
            self.undo()
        elif error is None and self.metrics_stream is not None:  # a dry run has none, and wrote no other file
            self.write_manifest()
        self.held.close()

    def write_manifest(self) -> None:
        """Write the manifest of the folder's own files, which change no more until the run is resumed."""
        events = [f"{EVENTS}/{file.name}" for file in self.events.glob("events.out.tfevents.*")]
        try:
            self.claim(MANIFEST)
            self.artifact.write_manifest([MARKER, RECIPE, METRICS, SAMPLES, PLOT, *events])
        except (OSError, ValueError) as error:
            self.notify(f"{self.path / MANIFEST} is not written: {error}")

    def check_manifest(self) -> None:
        """Say which of the files that a run that is resumed continues are not as they were written."""
        try:
            if MANIFEST in self.marker.names:
                self.artifact.verify()
        except (DamagedError, OSError) as error:
            self.notify(f"{error}; the run continues without regard to it")

    def undo(self) -> None:
        """A run that could not begin leaves nothing behind; one that was stopped can be resumed."""
        before = {} if self.names_before is None else self.names_before
        for name in FIRST_NAMES:
            if name in self.marker.names and name not in before:
                remove(self.path / name)
        if self.names_before is None:
            remove(self.path / MARKER)
        elif self.marker.names != before:
            self.marker.names = before
            self.marker.write()
        if self.recipe_before is not None and self.recipe_before != self.recipe_file.read_bytes():
            self.recipe_file.write_bytes(self.recipe_before)
        if self.manifest_before is not None:
            (self.path / MANIFEST).write_bytes(self.manifest_before)
        with contextlib.suppress(OSError):  # somebody else uses it by now
            for path in self.created:
                path.rmdir()

    def remove_leftovers(self) -> None:
        """Remove what a kill left half written."""
        names = [name for name in (*FILES, *FOLDERS) if name in self.marker.names]
        for name in names:
            ArtifactFolder(self.path / name).restore()
        self.artifact.remove_leftovers(*names)
        for path in self.artifact.leftovers(MARKER):  # the run does not own this name: what is in it decides
            with contextlib.suppress(OSError):
                if is_marker_part(path):
                    path.unlink()

    def claim(self, name: str) -> Path:
        """The place of something the run writes, which is the run's from now on."""
        self.marker.claim(name)
        return self.path / name

    def write_recipe(self) -> None:
        self.marker.remove_manifest()
        self.write_text(RECIPE, self.recipe.to_json())

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run, which is the run's from now on."""
        self.marker.claim(name)
        self.artifact.write_text(name, text)

    def start(self, step: int) -> None:
        """Write the recipe as run, and drop the metrics after a step; at step 0, also what an earlier run left."""
        self.artifact.inside(self.checkpoints).remove_leftovers("step-[0-9]*")
        if step == 0:
            self.remove_run()
        else:
            self.check_manifest()
        self.marker.remove_manifest()
        self.record_recipe(step)
        self.write_recipe()
        kept = "".join(json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step)
        self.write_text(METRICS, kept)
        self.claim(CHECKPOINTS)
        self.metrics_stream = self.metrics_file.open("a", encoding="utf-8")
        for logger in self.recipe.loggers:
            if logger in LOGGER_FOLDERS:
                self.claim(LOGGER_FOLDERS[logger])
        self.loggers.on_start(LoggedRun(self.path, self.recipe, step))

    def remove_run(self) -> None:
        """Delete what an earlier run in this folder has trained."""
        self.marker.record_checkpoint(None)
        for name in (METRICS, SAMPLES, PLOT, WANDB, MODEL):
            if name in self.marker.names:
                remove(self.path / name)
        for file in self.events.glob("events.out.tfevents.*") if EVENTS in self.marker.names else ():
            remove(file)
        remove_checkpoints(self.checkpoints)

    def record_recipe(self, step: int) -> None:
        """Note in the marker, and say, how the recipe of a run that is resumed differs from the one before."""
        before, now = ({**recipe, "out": None} for recipe in (self.marker.recipe, self.recipe.to_dict()))
        changes = describe_changes(before, now)
        if step == 0:
            source = self.recipe.init_from
            self.marker.start(self.recipe, None if source is None else fingerprint_model(resolve_folder(source)))
        elif changes:
            self.marker.add_recipe(step, self.recipe, changes)
            self.notify(f"from step {step} on the recipe is another one, as {MARKER} records: {'; '.join(changes)}")

    def log(self, step: int, **values: Any) -> None:
        """Write a line of metrics.jsonl, and give its numbers to the loggers."""
        numbers = {n: x for n, x in values.items() if isinstance(x, int | float)}
        finite = {name: x if name not in numbers or math.isfinite(x) else None for name, x in values.items()}
        self.metrics_stream.write(json.dumps({"step": step, **finite}) + "\n")
        self.metrics_stream.flush()
        self.loggers.log(step, numbers)

    def record_checkpoint(self, step: int) -> None:
        """Note in the marker that a checkpoint was written."""
        self.marker.record_checkpoint(step)

    def saved_step(self) -> int | None:
        """The step of a checkpoint that there has been: the marker names it, or metrics of later steps prove it."""
        every, last = self.marker.recipe["save"]["every"], max((line["step"] for line in self.metrics()), default=0)
        return (last - 1) // every * every if self.marker.saved is None and last > every else self.marker.saved

    def sync(self) -> None:
        """Have the disk hold the metrics so far, so that a checkpoint is never ahead of them."""
        os.fsync(self.metrics_stream.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one that a kill cut short is left out."""
        if not self.metrics_file.is_file():
            return []
        lines = []
        for text in self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
        return lines

    def keep_tokenizer(self, model: Transformer) -> None:
        """Keep the files about the tokenizer of a model that is fine-tuned or has a chat template.

        So the folder that it comes from is not needed again.
        """
        if model.origin is not None or model.chat_template is not None:
            place = self.claim(TOKENIZER_FOLDER)
            if others := sorted({*files_below(place)} - listed_files(place, set())):
                raise ValueError(f"{place} holds what no run wrote ({name_some(others, 5)}): move that away")
            with ArtifactFolder(place, "model").replace() as staged:
                write_tokenizers(model, None if model.origin is None else model.origin.folder, staged)

    def write_folder(self, name: str, write: Callable[[Path], None]) -> None:
        """Write data of the run, which replace those that it had under this name."""
        with ArtifactFolder(self.claim(name), "data").replace() as staged:
            write(staged)

    def finish(self, model: Transformer, sample: str | None, sources: list[TensorSource] | None = None) -> None:
        """Write the model's folder and the sample; `sources` make the weights where the model does not hold them."""
        if TOKENIZER_FOLDER in self.marker.names:
            ArtifactFolder(self.path / TOKENIZER_FOLDER, "model").verify()
            model.origin = Origin("phasor", self.path / TOKENIZER_FOLDER, model.config)
        place = self.claim(MODEL)
        if sources is None:
            save(model, place)
        else:
            with model_folder(place).replace() as staged:
                if model.adapters:
                    write_adapter(model, staged, DEFAULT, sources)
                else:
                    save_native(model, staged, sources=sources)
        if sample is not None:
            self.write_text(SAMPLES, sample + "\n")

    def plot(self) -> None:
        """Plot the losses against the steps in loss.png."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self.notify("matplotlib is not installed, so there is no loss.png")
            return
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        for name, label in (("loss", "training loss"), ("validation_loss", "validation loss")):
            points = [(line["step"], line[name]) for line in self.metrics() if is_finite(line.get(name))]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="o" if name == "validation_loss" else None)
        if axes.lines:
            axes.legend()
        with self.artifact.write(self.claim(PLOT).name) as file:
            figure.savefig(file, dpi=120, format="png")


def is_finite(value: object) -> bool:
    """Whether something out of metrics.jsonl is a number that can be drawn; JSON has null for the others."""
    return isinstance(value, int | float) and math.isfinite(value)
