"""What a run reports while it trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class SplitSize(NamedTuple):
    """How large a split is: documents or pairs, and tokens."""

    examples: int
    tokens: int


@dataclass(frozen=True)
class RunSummary:
    """What a run is about to do. `step` is where it stands, and above 0 in a run that is resumed."""

    folder: Path
    parameters: int
    vocab_size: int
    train: SplitSize
    valid: SplitSize
    device: str
    precision: str
    step: int
    steps: int
    tokens_per_step: int
    sequence_length: int


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
        """Data are being prepared, or the validation loss computed: `done` of `total`, where that is known."""

    def on_start(self, summary: RunSummary) -> None:
        """Everything is prepared, and the first step is next."""

    def on_step(self, report: StepReport) -> None:
        """An optimizer step was taken."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """The validation loss was computed."""

    def on_message(self, message: str) -> None:
        """Something worth a sentence happened."""
        print(f"phasor: {message}", file=sys.stderr)
