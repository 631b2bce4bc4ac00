"""What a run reports while it trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """Where a run stands after an optimizer step."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_second: float
    seconds_left: float


class TrainingProgress:
    """Follows a run. This one prints messages to stderr and nothing else; override what you want to see.

    >>> class Losses(TrainingProgress):
    ...     def on_step(self, report):
    ...         print(report.step, round(report.loss, 2))
    >>> Losses().on_step(StepReport(step=1, steps=10, loss=2.345, lr=0.1, tokens_per_second=9.0, seconds_left=3.0))
    1 2.35
    """

    def on_prepare(self, what: str, done: int, total: int | None) -> None:
        """Data are being prepared: `done` of `total`, where that is known."""

    def on_step(self, report: StepReport) -> None:
        """An optimizer step was taken."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """The validation loss was computed."""

    def on_message(self, message: str) -> None:
        """Something worth a sentence happened."""
        print(f"phasor: {message}", file=sys.stderr)
