"""Ctrl-C and SIGTERM: the first asks a run to save and end, a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Remembers, for the length of a `with`, whether a signal asked the process to stop.

    Until `graceful` is set there is nothing to save, and the first signal ends the process like a second: Ctrl-C
    as `KeyboardInterrupt`, SIGTERM as `SystemExit(143)`. In other threads than the main one it does nothing.

    >>> with StopSignal() as stop:
    ...     stop.graceful = True
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.requested, stop.exit_code
    (True, 143)
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.graceful = False
        self.before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM, else 0."""
        return 0 if self.signal is None else 128 + self.signal

    def agree(self) -> None:
        """All processes of the run know that one of them was asked to stop."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._handle) for number in HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.graceful and self.signal is None:
            self.signal = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


class SharedStopSignal(StopSignal):
    """The same for one of several processes: a stop is requested once all of them know, so that they end together."""

    def __init__(self) -> None:
        super().__init__()
        self.agreed = False

    @property
    def requested(self) -> bool:
        return self.agreed

    @property
    def exit_code(self) -> int:
        return 128 + (signal.SIGTERM if self.signal is None else self.signal) if self.agreed else 0

    def agree(self) -> None:
        self.agreed = True
