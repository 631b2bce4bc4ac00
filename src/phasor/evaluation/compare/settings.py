"""The settings of a comparison, checked: what is trained, how large, on what, and how far it is tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasor.config.schema import check_integer, plural, quote, unknown
from phasor.data.tasks import TASKS
from phasor.device import resolve_device
from phasor.evaluation.compare.questions import question_schemes
from phasor.evaluation.compare.schemes import ComparedScheme, parse_schemes
from phasor.evaluation.protocols import PROTOCOLS
from phasor.models.extensions import parse_length

LENGTHS = (1, 2, 4, 8, 16)  # times the trained length, of texts
SIZES_TESTED = (1, 2, 3, 4)  # times the trained size, of problems
TEXT_SCHEMES = "none,sinusoidal,t5,alibi,rotary"
TASK_SCHEMES = {"addition": "none,learned,rotary,learned:coupled,rotary:coupled"}
SMALL, LARGE = "small", "large"


@dataclass(frozen=True)
class Size:
    """How large a comparison is; the first fields are for texts, the last ones for tasks."""

    model: dict[str, int]
    length: int
    vocab_size: int
    batch_tokens: int
    steps: int
    lr: float
    rows: int
    task_model: dict[str, int]
    task_length: int
    task_rows: int
    task_steps: int
    task_lr: float
    trials: int


SIZES = {
    SMALL: Size(
        model={"dim": 128, "hidden_dim": 384, "num_layers": 3, "num_heads": 4},
        length=64, vocab_size=1024, batch_tokens=1024, steps=500, lr=2e-3, rows=64,
        task_model={"dim": 64, "hidden_dim": 192, "num_layers": 2, "num_heads": 4},
        task_length=6, task_rows=64, task_steps=2000, task_lr=2e-3, trials=200,
    ),
    LARGE: Size(
        model={"dim": 384, "num_layers": 8, "num_heads": 6},
        length=512, vocab_size=8192, batch_tokens=65536, steps=1500, lr=1e-3, rows=400,
        task_model={"dim": 256, "num_layers": 4, "num_heads": 8},
        task_length=20, task_rows=512, task_steps=10000, task_lr=5e-4, trials=1000,
    ),
}  # fmt: skip
# One wide layer adds numbers of more digits than it was trained on better than several narrow ones do.
TASK_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    (SMALL, "addition"): {
        "task_model": {"dim": 256, "num_layers": 1, "num_heads": 4}, "task_steps": 1200, "task_lr": 5e-4
    },
    (LARGE, "addition"): {
        "task_model": {"dim": 512, "num_layers": 1, "num_heads": 4},
        "task_rows": 256, "task_steps": 5000, "task_lr": 3e-4,
    },
}  # fmt: skip


def size_for(name: str, task: str | None) -> Size:
    """The size of that name, as it is for a task.

    >>> size_for("small", "addition").task_model["num_layers"], size_for("small", "sort").task_model["num_layers"]
    (1, 2)
    """
    return dataclasses.replace(SIZES[name], **TASK_SIZES.get((name, task or ""), {}))


@dataclass(frozen=True)
class CompareSettings:
    """The checked settings. `length` counts tokens of a text, or items of a problem, that are trained on."""

    schemes: tuple[ComparedScheme, ...]
    seeds: int
    task: str | None
    data: str | None
    valid: str | None
    tokenizer: str
    join: bool
    length: int
    steps: int
    protocol: str
    rows: int
    size: str
    device: str

    @property
    def sizes(self) -> Size:
        return size_for(self.size, self.task)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that are tested."""
        return tuple(self.length * times for times in (LENGTHS if self.task is None else SIZES_TESTED))

    def fixed_values(self) -> dict[str, Any]:
        """What has to be the same in a comparison that goes on: all but the schemes, the seeds and the device.

        More of these may be asked for later.
        """
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in ("schemes", "seeds", "device")}


def check_compare_settings(
    *,
    schemes: str | Sequence[str] | None = None,
    question: str | None = None,
    data: str | None = None,
    valid: str | None = None,
    task: str | None = None,
    length: int | str | None = None,
    seeds: int = 1,
    steps: int | None = None,
    protocol: str = "last",
    tokenizer: str | None = None,
    join: bool = False,
    rows: int | None = None,
    size: str | None = None,
    device: str = "auto",
) -> CompareSettings:
    """The settings, or the first mistake in a sentence.

    >>> settings = check_compare_settings(schemes="rotary,alibi", task="addition", length=5, device="cpu")
    >>> settings.lengths, settings.size, settings.tokenizer
    ((5, 10, 15, 20), 'small', 'bytes')
    """
    if task is not None and (not isinstance(task, str) or task not in TASKS):
        raise unknown("task", task, TASKS)
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if size is not None and size not in SIZES:
        raise unknown("size", size, SIZES)
    for name, value in (("seeds", seeds), ("steps", steps), ("rows", rows)):
        if value is not None:
            check_integer(name, value)
    if question is not None and schemes is not None:
        raise ValueError(f"--question {question} says what is compared: leave --schemes out")
    if task is not None and (data is not None or valid is not None):
        raise ValueError(f"--task {task} makes its own problems: leave --{'valid' if data is None else 'data'} out")
    if task is not None and (join or protocol != "last"):
        raise ValueError(f"--{'join' if join else 'protocol'} is for texts: leave it out with --task {task}")
    if valid is not None and data is None:
        raise ValueError("--valid needs --data, the texts to train on")
    chosen = size or (LARGE if resolve_device(device).type == "cuda" else SMALL)
    sizes = size_for(chosen, task)
    usual = (
        (sizes.length, sizes.steps, sizes.rows) if task is None else (sizes.task_length, sizes.task_steps, sizes.trials)
    )
    trained = usual[0] if length is None else check_length(length, task)
    if question is not None:
        model = sizes.model if task is None else sizes.task_model
        compared = question_schemes(question, model["dim"] // model["num_heads"], trained)
    else:
        compared = parse_schemes(TASK_SCHEMES.get(task or "", TEXT_SCHEMES) if schemes is None else schemes, task)
    return CompareSettings(
        schemes=compared,
        seeds=seeds,
        task=task,
        data=data,
        valid=valid,
        tokenizer=tokenizer or ("bpe" if task is None else "bytes"),
        join=join,
        length=trained,
        steps=usual[1] if steps is None else steps,
        protocol=protocol,
        rows=usual[2] if rows is None else rows,
        size=chosen,
        device=device,
    )


def check_length(length: int | str, task: str | None) -> int:
    """The trained length; of a task it is a number of items.

    >>> check_length("1k", None), check_length("6", "sort")
    (1024, 6)
    """
    if task is None:
        return parse_length(length)
    try:
        number = int(length)
    except ValueError:
        raise ValueError(
            f"--length is a number of {TASKS[task].item}s for --task {task}, not {quote(length)}"
        ) from None
    shortest, item = TASKS[task].shortest, TASKS[task].item
    if number < shortest:
        least = plural(shortest, item)
        raise ValueError(f"--length {number} is below the shortest problem of the task {task!r}, which has {least}")
    return number
