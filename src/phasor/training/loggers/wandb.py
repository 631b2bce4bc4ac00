"""Metrics for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasor.distribution import missing_package
from phasor.training.loggers.base import LoggedRun

WANDB = "wandb"
PROJECT = "phasor"  # unless WANDB_PROJECT names one


class WandbLogger:
    """Logs to a run named after the folder, which keeps its files in `wandb/` and is continued when that is resumed.

    Where to and as whom is for wandb's own settings, as WANDB_MODE=offline, WANDB_PROJECT and WANDB_API_KEY.
    """

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise missing_package("the logger wandb needs the package wandb", "wandb") from None
        self.module = wandb
        self.run: Any = None

    def on_start(self, run: LoggedRun) -> None:
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.resolve().name,
            id=last_id(run.folder / WANDB) if run.step else None,
            resume="allow" if run.step else None,
            dir=str(run.folder),
            config=run.recipe.to_dict(),
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


def last_id(folder: Path) -> str | None:
    """The id of the run that wandb wrote last to a folder, by its name there; None where there is none.

    >>> last_id(Path("nowhere"))
    """
    names = sorted(path.name for path in folder.glob("*run-*-*") if path.is_dir())
    return max(names, key=lambda name: name.partition("run-")[2]).rpartition("-")[2] if names else None
