"""The folder of a run: the recipe as run, metrics, TensorBoard events, checkpoints, samples, a plot and the model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phasor.checkpoints import save
from phasor.config.recipe import Recipe
from phasor.model import Transformer
from phasor.training.state import Say, checkpoints

RUNS, LOCK = Path("runs"), ".lock"


def run_folder(recipe: Recipe, resume: bool) -> Path:
    """Where a run goes: `out`, or a numbered folder below `runs`, the last one to go on with or the next one."""
    if recipe.out is not None:
        return Path(recipe.out)
    numbers = [int(n) for n in (p.name.removeprefix(f"{recipe.task}-") for p in RUNS.glob(f"{recipe.task}-*"))
               if n.isdecimal()]  # fmt: skip
    last = max(numbers, default=0)
    return RUNS / f"{recipe.task}-{last if resume and last else last + 1}"


class Run:
    """The folder while a run writes to it; one process at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Run(Path(folder), Recipe(), resume=False) as run:
    ...     run.start(0)
    ...     run.log(10, loss=2.5)
    ...     run.metrics()
    [{'step': 10, 'loss': 2.5}]
    """

    def __init__(self, folder: Path, recipe: Recipe, *, resume: bool, say: Say = print) -> None:
        self.folder, self.recipe, self.resume, self.say = folder, recipe, resume, say
        self.checkpoints, self.events = folder / "checkpoints", folder / "events"
        self.metrics_file, self.recipe_file = folder / "metrics.jsonl", folder / "recipe.json"
        self.opened: Any = None
        self.writer: Any = None

    def __enter__(self) -> Self:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, and a run needs a folder")
        if not self.resume and checkpoints(self.checkpoints):
            raise ValueError(f"{self.folder} holds a run already: resume it, or give another folder as out")
        self.made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except OSError:
            os.close(self.lock)
            raise ValueError(f"another process is training in {self.folder}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in (self.opened, self.writer):
            if writer is not None:
                writer.close()
        if error is not None and self.opened is None:
            self.undo()
        os.close(self.lock)

    def undo(self) -> None:
        """A run that never began leaves nothing behind."""
        if self.folder in self.made:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif [entry.name for entry in self.folder.iterdir()] == [LOCK]:
            (self.folder / LOCK).unlink()
        with contextlib.suppress(OSError):  # somebody else uses it by now
            for path in self.made[1:]:
                path.rmdir()

    def start(self, step: int) -> None:
        """Write the recipe as run, and forget the metrics after a step."""
        staged = self.recipe_file.with_suffix(".part")
        staged.write_text(self.recipe.to_json(), encoding="utf-8")
        os.replace(staged, self.recipe_file)
        kept = "".join(json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step)
        staged = self.metrics_file.with_suffix(".part")
        staged.write_text(kept, encoding="utf-8")
        os.replace(staged, self.metrics_file)
        self.opened = self.metrics_file.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say("tensorboard is not installed, so there are no events")
        else:
            self.writer = SummaryWriter(str(self.events), purge_step=step + 1 if step else None)

    def log(self, step: int, **values: Any) -> None:
        """A line of metrics.jsonl, and the same numbers as events."""
        self.opened.write(json.dumps({"step": step, **values}) + "\n")
        self.opened.flush()
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
        """Write the model's folder, the sample and the plot."""
        save(model, self.folder / "model")
        if sample is not None:
            (self.folder / "samples.txt").write_text(sample + "\n", encoding="utf-8")

    def plot(self) -> None:
        """Draw the losses against the steps into loss.png."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self.say("matplotlib is not installed, so there is no loss.png")
            return
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        for name in ("loss", "validation"):
            points = [(line["step"], line[name]) for line in self.metrics() if math.isfinite(line.get(name, math.nan))]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="o" if name == "validation" else None)
        if axes.lines:
            axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)
