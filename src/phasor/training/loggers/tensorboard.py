"""Events for TensorBoard in the folder of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phasor.distribution import missing_package
from phasor.training.loggers.base import LoggedRun

EVENTS = "events"


class TensorBoardLogger:
    """Writes `events/`, in which steps that a resumed run logs again take the place of those before."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("events need the package tensorboard", "train") from None
        self.make = SummaryWriter
        self.writer: Any = None
        self.errors = contextlib.ExitStack()

    def on_start(self, run: LoggedRun) -> None:
        wait_for_another_second(run.folder / EVENTS)
        self.errors.enter_context(silence_writer_threads())
        self.writer = self.make(str(run.folder / EVENTS), purge_step=run.step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        with self.errors:
            if self.writer is not None:
                self.writer.close()


@contextlib.contextmanager
def silence_writer_threads() -> Iterator[None]:
    """Keep the threads of TensorBoard from printing their errors, which the next call of the writer raises."""
    before = threading.excepthook

    def report(given: threading.ExceptHookArgs) -> None:
        if not type(given.thread).__module__.startswith("tensorboard."):
            before(given)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def wait_for_another_second(events: Path) -> None:
    """Wait while a file of events is of the present second: TensorBoard reads them by name, in which that comes first.

    >>> wait_for_another_second(Path("nowhere"))
    """
    seconds = {path.name.split(".")[3] for path in events.glob("events.out.tfevents.*")}
    while f"{int(time.time()):010d}" in seconds:
        time.sleep(0.02)
