"""The tasks that a recipe can choose, and what data each of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["lm", "translation", "mlm"]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """What of `DataConfig` a task takes: formats that generate data, parallel files, positions given by the data."""

    generates: tuple[str, ...] = ()
    parallel: bool = False
    positions: bool = False


TASKS: dict[Task, TaskData] = {
    "lm": TaskData(generates=("python", "recall"), positions=True),
    "translation": TaskData(generates=("dates",), parallel=True),
    "mlm": TaskData(generates=("python", "recall"), positions=True),
}


def tasks_with(format: str) -> str:
    """The tasks that a format generates data for, as text.

    >>> tasks_with("dates"), tasks_with("python")
    ('translation', 'lm and mlm')
    """
    return " and ".join(task for task, data in TASKS.items() if format in data.generates)
