"""What a command prints: tables, JSON and progress bars."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from typing import IO, Any

from phasor.cli.streams import escape_controls
from phasor.distribution import missing_package

# Control characters that JSON allows in strings and a terminal obeys.
JSON_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}


LINE_SECONDS = 30.0  # between two lines of progress, where they are not for a terminal
NUMERIC = ("pair", "axis", "frequency", "wavelength", "rotations", "new wavelength", "ratio", "share of downloads")
CLEAR = "\r\x1b[K"


def check_loss(loss: float | None) -> None:
    """Refuse the loss of a model that computes no numbers, after it was printed: a script sees that by the exit code.

    >>> check_loss(float("nan"))
    Traceback (most recent call last):
    ValueError: the loss is not finite: the model's weights are not, or an activation exceeds its dtype's range
    """
    if loss is None or not math.isfinite(loss):
        raise ValueError(
            "the loss is not finite: the model's weights are not, or an activation exceeds its dtype's range"
        )


class Bar:
    """Progress on standard error with the time left: a live line on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self.what, self.shown = what, ""
        self.first: tuple[float, int] | None = None  # when it was first called, and what was done by then
        self.printed_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.first = self.first or (now, done)
        line = format_bar(self.what, done, total, now - self.first[0], done - self.first[1])
        if sys.stderr.isatty():
            if line != self.shown:
                print(f"{CLEAR}{line}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        elif now - self.printed_at >= LINE_SECONDS:
            self.printed_at = now
            print(line, file=sys.stderr, flush=True)
        self.shown = line


def format_bar(what: str, done: int, total: int, seconds: float, measured: int) -> str:
    """One line of progress; `measured` of what is done took these seconds.

    >>> format_bar("evaluating", 500, 1000, 8.0, 400)
    'evaluating ███████████████░░░░░░░░░░░░░░░  50 %, 0:10 left'
    """
    share = done / max(total, 1)
    left = f", {clock(seconds / measured * (total - done))} left" if measured > 0 and done < total else ""
    return f"{what} {bar(share)} {100 * share:3.0f} %{left}"


def bar(share: float, width: int = 30) -> str:
    """
    >>> bar(0.4, 10)
    '████░░░░░░'
    """
    return f"{'█' * round(width * share):░<{width}}"


def clock(seconds: float) -> str:
    """
    >>> clock(83.4), clock(7384)
    ('1:23', '2:03:04')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def printable(text: str) -> str:
    """A text that a model wrote, without the control characters that would move a terminal's cursor.

    >>> printable("a\\tb\\x1b[2J")
    'a\\tb�[2J'
    """
    controls = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
    encoding = sys.stdout.encoding or "utf-8"
    return text.translate(controls).encode(encoding, "replace").decode(encoding)


def print_json(value: Any, file: IO[str] | None = None) -> None:
    """Print JSON that any reader takes: in the letters of the file's encoding, without control characters."""
    from phasor.config.schema import json_value

    file = sys.stdout if file is None else file
    unicode = (getattr(file, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(json_value(value), indent=2, ensure_ascii=not unicode)
    print(text.translate(JSON_ESCAPES), file=file)


def console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        raise missing_package("without --json there are tables, which need the package rich", "cli") from None
    return Console(width=None if sys.stdout.isatty() else 140)


def new_table(title: str, heads: list[str]) -> Any:
    console()
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escape_controls(title), "table.title"), title_justify="left", header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in NUMERIC else "left", overflow="fold")
    return table


def show(table: Any) -> None:
    console().print(table)


def show_table(title: str, heads: list[str], rows: Iterable[Iterable[object]]) -> None:
    """Print rows of cells below a title and their heads."""
    table = new_table(title, heads)
    for row in rows:
        table.add_row(*map(str, row))
    show(table)


def show_text(title: str, lines: list[str]) -> None:
    """Print lines below a title; either may contain names of folders."""
    screen = console()
    from rich.text import Text

    screen.print()
    screen.print(Text(escape_controls(title), "bold"))
    for line in lines:
        screen.print(Text(f"  {escape_controls(line)}"))
