"""Metrics for Trackio."""

from __future__ import annotations

from collections.abc import Mapping

from phasor.distribution import missing_package
from phasor.training.loggers.base import LoggedRun

PROJECT = "phasor"


class TrackioLogger:
    """Logs to a run of the project "phasor" named after the folder, which is continued when that is resumed."""

    def __init__(self) -> None:
        try:
            import trackio
        except ImportError:
            raise missing_package("the logger trackio needs the package trackio", "trackio") from None
        self.module, self.started = trackio, False

    def on_start(self, run: LoggedRun) -> None:
        resume = "allow" if run.step else "never"
        self.module.init(project=PROJECT, name=run.folder.resolve().name, config=run.recipe.to_dict(), resume=resume)
        self.started = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def finish(self) -> None:
        if self.started:
            self.module.finish()
