"""Loggers as a run calls them: one that fails is reported and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from phasor.config.schema import shorten
from phasor.training.loggers.base import LoggedRun, Logger


class GuardedLoggers:
    """Several loggers, none of which can end a run.

    >>> said = []
    >>> loggers = GuardedLoggers([object()], said.append)
    >>> loggers.log(1, {"loss": 2.5})
    >>> said
    ["object logs no more: AttributeError: 'object' object has no attribute 'log'"]
    """

    def __init__(self, loggers: Iterable[Logger], notify: Callable[[str], None]) -> None:
        self.loggers, self.notify = list(loggers), notify

    def on_start(self, run: LoggedRun) -> None:
        self.call(lambda logger: logger.on_start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.call(lambda logger: logger.log(step, values))

    def finish(self) -> None:
        """End all loggers, those that have failed included, which are not heard of again."""
        self.call(lambda logger: logger.finish())

    def call(self, act: Callable[[Logger], None]) -> None:
        """Call every logger; one that fails is ended and left out."""
        for logger in [*self.loggers]:
            try:
                act(logger)
            except Exception as error:  # any that a package of somebody else raises
                self.loggers.remove(logger)
                name = type(logger).__name__
                self.notify(f"{name} logs no more: {type(error).__name__}: {shorten(' '.join(str(error).split()))}")
                self.end(logger)

    def end(self, logger: Logger) -> None:
        """Let go of what a logger that has failed still holds."""
        try:
            logger.finish()
        except Exception:  # it has been reported
            return
