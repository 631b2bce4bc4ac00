"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["finished", "interrupted", "diverged", "dry run"]


@dataclass(frozen=True)
class TrainingResult:
    """What `train` returns.

    `loss` is that of the last step, `validation_loss` the last one, `best_loss` the lowest validation loss and
    `best_step` the step it was computed at; `model_step` is the step whose weights became the model. `exit_code` is
    what a command should end with: 0 when finished, 1 when diverged, 130 after Ctrl-C and 143 after SIGTERM. `overhead`
    is the share of the loop's time that neither the model nor the optimizer took.

    >>> TrainingResult(folder=Path("runs/lm-1"), status="finished", exit_code=0, step=9, steps=9).status
    'finished'
    """

    folder: Path
    status: Status
    exit_code: int
    step: int
    steps: int
    loss: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    model_step: int | None = None
    skips: int = 0
    seconds: float = 0.0
    overhead: float = 0.0
    sample: str | None = None
