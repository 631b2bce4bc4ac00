"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ending = Literal["finished", "interrupted", "diverged"]


@dataclass(frozen=True)
class Result:
    """What `train` gives back.

    `loss` is the last update's, `validation` the last validation loss, `best` the lowest and `best_step` where it was.
    `exit_code` is what a command should end with: 0 when finished, 1 when diverged, 130 after Ctrl-C and 143 after
    SIGTERM. `outside` is the share of the loop's time that neither the model nor the optimizer took.

    >>> Result(folder=Path("runs/lm-1"), ending="finished", exit_code=0, step=9, steps=9).ending
    'finished'
    """

    folder: Path
    ending: Ending
    exit_code: int
    step: int
    steps: int
    loss: float | None = None
    validation: float | None = None
    best: float | None = None
    best_step: int | None = None
    skips: int = 0
    seconds: float = 0.0
    outside: float = 0.0
    sample: str | None = None
