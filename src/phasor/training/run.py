"""The folder of a run: the recipe as run, metrics, TensorBoard events, checkpoints, samples, a plot and the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phasor.checkpoints import save
from phasor.config.recipe import Recipe
from phasor.files import atomic_write, lock, remove
from phasor.training.state import Notify, checkpoints
from phasor.transformer import Transformer

RUNS, LOCK = Path("runs"), ".lock"
FIRST_FILES = (LOCK, "recipe.json", "data")  # what there may be before the first step
LEFTOVERS = (
    *(".recipe.json.part", ".metrics.jsonl.part", ".samples.txt.part", ".loss.png.part", ".data.part"),
    *(".model-*.part", ".model-*.old", ".data-*.part", ".data-*.old"),
)


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

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunFolder(Path(folder), Recipe(), resume=False) as run:
    ...     run.start(0)
    ...     run.log(10, loss=2.5)
    ...     run.metrics()
    [{'step': 10, 'loss': 2.5}]
    """

    def __init__(self, folder: Path, recipe: Recipe, *, resume: bool, notify: Notify = print) -> None:
        self.path, self.recipe, self.resume, self.notify = folder, recipe, resume, notify
        self.checkpoints, self.events = folder / "checkpoints", folder / "events"
        self.metrics_file, self.recipe_file = folder / "metrics.jsonl", folder / "recipe.json"
        self.metrics_stream: Any = None
        self.writer: Any = None

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and a run needs a folder")
        if not self.resume and checkpoints(self.checkpoints):
            raise ValueError(f"{self.path} holds a run already: resume it, or give another folder as out")
        self.created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.existing = [name for name in FIRST_FILES if os.path.lexists(self.path / name)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            lock(self.lock)  # goes with the process, however it ends
        except BlockingIOError:
            os.close(self.lock)
            raise ValueError(f"another process is training in {self.path}") from None
        self.remove_leftovers()
        self.recipe_before = self.recipe_file.read_bytes() if self.recipe_file.is_file() else None
        if not self.resume or self.recipe_before is None:  # so that a run killed before its first step can be resumed
            self.write_recipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in (self.metrics_stream, self.writer):
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                if writer is not None:
                    writer.close()
        if isinstance(error, Exception) and self.metrics_stream is None:
            self.undo()
        os.close(self.lock)

    def undo(self) -> None:
        """A run that could not begin leaves nothing behind; one that was stopped can be resumed."""
        if self.path in self.created:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for path in (self.path / name for name in FIRST_FILES if name not in self.existing):
                remove(path)
            if self.recipe_before is not None:
                self.recipe_file.write_bytes(self.recipe_before)
        with contextlib.suppress(OSError):  # somebody else uses it by now
            for path in self.created[1:]:
                path.rmdir()

    def remove_leftovers(self) -> None:
        """Remove what a kill left half written."""
        for pattern in LEFTOVERS:
            for path in self.path.glob(pattern):
                remove(path)

    def write_recipe(self) -> None:
        with atomic_write(self.recipe_file) as file:
            file.write_text(self.recipe.to_json(), encoding="utf-8")

    def start(self, step: int) -> None:
        """Write the recipe as run, and drop the metrics after a step."""
        self.write_recipe()
        kept = "".join(json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step)
        with atomic_write(self.metrics_file) as file:
            file.write_text(kept, encoding="utf-8")
        self.metrics_stream = self.metrics_file.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.notify("tensorboard is not installed, so there are no events")
        else:
            wait_for_another_second(self.events)
            self.writer = SummaryWriter(str(self.events), purge_step=step + 1)

    def log(self, step: int, **values: Any) -> None:
        """Write a line of metrics.jsonl, and the same values as events."""
        self.metrics_stream.write(json.dumps({"step": step, **values}) + "\n")
        self.metrics_stream.flush()
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(name, value, step)

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

    def finish(self, model: Transformer, sample: str | None) -> None:
        """Write the model's folder and the sample."""
        save(model, self.path / "model")
        if sample is not None:
            with atomic_write(self.path / "samples.txt") as file:
                file.write_text(sample + "\n", encoding="utf-8")

    def plot(self) -> None:
        """Plot the losses against the steps in loss.png."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self.notify("matplotlib is not installed, so there is no loss.png")
            return
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        for name in ("loss", "validation_loss"):
            points = [(line["step"], line[name]) for line in self.metrics() if math.isfinite(line.get(name, math.nan))]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="o" if name == "validation_loss" else None)
        if axes.lines:
            axes.legend()
        with atomic_write(self.path / "loss.png") as file:
            figure.savefig(file, dpi=120, format="png")


def wait_for_another_second(events: Path) -> None:
    """Wait while a file of events is of the present second: TensorBoard reads them by name, in which that comes first.

    >>> wait_for_another_second(Path("nowhere"))
    """
    seconds = {path.name.split(".")[3] for path in events.glob("events.out.tfevents.*")}
    while f"{int(time.time()):010d}" in seconds:
        time.sleep(0.02)
