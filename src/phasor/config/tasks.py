"""The tasks that a recipe can choose, and what data each of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["lm", "translation", "mlm", "classify", "embed", "distill", "chat", "preference"]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """What of `DataConfig` a task takes: formats that generate data, parallel files, positions given by the data.

    With `turns` its examples are the turns of conversations, as a chat template writes them. `settings` is the field of
    `Recipe` that is for this task alone.
    """

    generates: tuple[str, ...] = ()
    parallel: bool = False
    positions: bool = False
    turns: bool = False
    settings: str | None = None


TASKS: dict[Task, TaskData] = {
    "lm": TaskData(generates=("python", "recall"), positions=True),
    "translation": TaskData(generates=("dates",), parallel=True),
    "mlm": TaskData(generates=("python", "recall"), positions=True),
    "classify": TaskData(settings="classify"),
    "embed": TaskData(settings="embed"),
    "distill": TaskData(generates=("python", "recall"), positions=True, settings="distill"),
    "chat": TaskData(generates=("docstrings",), turns=True),
    "preference": TaskData(turns=True, settings="preference"),
}


def tasks_with(format: str) -> str:
    """The tasks that a format generates data for, as text.

    >>> tasks_with("dates"), tasks_with("python")
    ('translation', 'lm, mlm and distill')
    """
    *others, last = (task for task, data in TASKS.items() if format in data.generates)
    return f"{', '.join(others)} and {last}" if others else last
