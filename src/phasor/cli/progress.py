"""The progress of a training run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping

from phasor.cli.output import CLEAR, LINE_SECONDS, bar, clock
from phasor.cli.recipe_options import name_options
from phasor.cli.streams import escape_controls
from phasor.config.schema import plural
from phasor.training import RunSummary, StepReport, TrainingProgress

REFRESH_SECONDS = 0.1  # between two refreshes of the live line


def progress_display(typed: Mapping[str, str] | None = None) -> LiveProgress | PlainProgress:
    """The display that suits standard error; messages name the fields in `typed` as they were typed."""
    return LiveProgress(typed) if sys.stderr.isatty() else PlainProgress(typed)


class Display(TrainingProgress):
    """What both displays have in common: lines about evaluations, and messages."""

    def __init__(self, typed: Mapping[str, str] | None = None) -> None:
        self.typed = {} if typed is None else typed

    def on_evaluation(self, step: int, loss: float) -> None:
        self.keep(f"step {step:,}: validation loss {loss:.4f}")

    def on_message(self, message: str) -> None:
        self.keep(escape_controls(f"phasor: {name_options(message, self.typed)}"))

    def keep(self, text: str) -> None:
        """A line that stays."""
        write_stderr(text)


class LiveProgress(Display):
    """One line that is refreshed, below the lines that stay."""

    def __init__(self, typed: Mapping[str, str] | None = None) -> None:
        super().__init__(typed)
        self.line, self.drawn = "", -math.inf

    def on_prepare(self, what: str, done: int, total: int | None) -> None:
        self.draw(format_count(what, done, total), done / total if total else None, at_once=done in (0, total))

    def on_start(self, summary: RunSummary) -> None:
        self.keep("\n".join(format_summary(summary)))

    def on_step(self, report: StepReport) -> None:
        self.draw(format_step(report), report.step / report.steps, at_once=report.step == report.steps)

    def close(self) -> None:
        """Take the live line away."""
        self.line = ""
        write_stderr(CLEAR, end="")

    def keep(self, text: str) -> None:
        """A line that stays, with the live one below it."""
        write_stderr(f"{CLEAR}{text}\n{self.line}", end="")

    def draw(self, text: str, share: float | None, at_once: bool) -> None:
        """Draw what is going on, with a bar that fills the line where the share done is known."""
        now = time.monotonic()
        if now - self.drawn < REFRESH_SECONDS and not at_once:
            return
        room = columns() - len(text) - 2
        shown = text if share is None or room < 5 else f"{bar(share, min(room, 30))} {text}"
        self.line, self.drawn = shown[: columns() - 1], now
        write_stderr(f"{CLEAR}{self.line}", end="")


class PlainProgress(Display):
    """For logs: a line at every tenth of a run, at every evaluation, and about preparation if it takes long."""

    def __init__(self, typed: Mapping[str, str] | None = None) -> None:
        super().__init__(typed)
        self.report: StepReport | None = None
        self.printed_at = time.monotonic()

    def on_prepare(self, what: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.printed_at >= LINE_SECONDS:
            self.printed_at = time.monotonic()
            write_stderr(format_count(what, done, total))

    def on_start(self, summary: RunSummary) -> None:
        for line in format_summary(summary):
            write_stderr(line)

    def on_step(self, report: StepReport) -> None:
        before, self.report = self.report, report
        tenth = 10 * report.step // report.steps
        if before is None or tenth > 10 * before.step // report.steps:
            write_stderr(format_step(report))

    def close(self) -> None:
        """Plain lines stay: there is nothing to remove."""


def write_stderr(text: str, end: str = "\n") -> None:
    """Write to standard error; a closed one does not end a run."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def format_count(what: str, done: int, total: int | None) -> str:
    """
    >>> format_count("tokenizing", 5000, 12000), format_count("reading", 0, None)
    ('tokenizing 5,000/12,000', 'reading')
    """
    return f"{what} {done:,}/{total:,}" if total else f"{what} {done:,}" if done else what


def format_summary(summary: RunSummary) -> list[str]:
    """The lines a run begins with."""
    splits = (
        f"{plural(split.examples, 'example')} with {plural(split.tokens, 'token')}"
        for split in (summary.train, summary.valid)
    )
    begun = f", from step {summary.step:,}" if summary.step else ""
    return [
        f"model    {summary.parameters:,} parameters, vocabulary of {summary.vocab_size:,}",
        "data     {} to train on, {} to validate with".format(*splits),
        f"training {summary.steps:,} steps of up to {summary.tokens_per_step:,} tokens{begun}, "
        f"in rows of up to {summary.sequence_length:,}, on {summary.device} in {summary.precision}",
        f"run      {escape_controls(str(summary.folder))}",
    ]


def format_step(report: StepReport) -> str:
    """
    >>> format_step(StepReport(step=20, steps=100, loss=3.21, lr=0.1, tokens_per_second=5120.3, seconds_left=83.0))
    'step 20/100, loss 3.210, 5,120 tokens/s, 1:23 left'
    """
    return (
        f"step {report.step:,}/{report.steps:,}, loss {report.loss:.3f}, "
        f"{report.tokens_per_second:,.0f} tokens/s, {clock(report.seconds_left)} left"
    )


def columns() -> int:
    """How wide the terminal is."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
