"""What a run tells whoever watches it."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Where a run stands after an update."""

    step: int
    steps: int
    loss: float
    rate: float
    tokens_per_second: float
    seconds_left: float


class Watcher:
    """Follows a run. This one prints sentences to stderr and shows nothing else; override what you want to see.

    >>> class Losses(Watcher):
    ...     def stepped(self, report):
    ...         print(report.step, round(report.loss, 2))
    >>> Losses().stepped(Report(step=1, steps=10, loss=2.345, rate=0.1, tokens_per_second=9.0, seconds_left=3.0))
    1 2.35
    """

    def preparing(self, what: str, done: int, total: int | None) -> None:
        """Data are being prepared: `done` of `total`, where that is known."""

    def stepped(self, report: Report) -> None:
        """An update was made."""

    def evaluated(self, step: int, loss: float) -> None:
        """The validation loss was measured."""

    def say(self, sentence: str) -> None:
        """Something worth a sentence happened."""
        print(f"phasor: {sentence}", file=sys.stderr)
