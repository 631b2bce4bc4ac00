"""The protocol of loggers: they are told when a run starts, of its metrics, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from phasor.config.recipe import Recipe


class LoggedRun(NamedTuple):
    """What a logger is told of a run: its folder, its recipe, and the step it begins at, above 0 if it is resumed."""

    folder: Path
    recipe: Recipe
    step: int


class Logger(Protocol):
    """What `phasor.train(..., loggers=[...])` takes. Of several processes the first one calls it.

    What a logger raises is reported once, and it is not called again: a run does not end because of it.
    """

    def on_start(self, run: LoggedRun) -> None:
        """Before the first step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step by their names, as in metrics.jsonl: `loss`, `lr`, `validation_loss` and so on.

        A run that is resumed logs steps again that came after its checkpoint.
        """

    def finish(self) -> None:
        """After the last step, also of a run that is stopped or fails."""
