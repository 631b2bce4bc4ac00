"""The run folder as seen by the processes that follow the first one: they read it and write nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from phasor.checkpoints.tensors import TensorSource, shard_sources
from phasor.training.progress import RunSummary, TrainingProgress
from phasor.training.run import RunFolder
from phasor.transformer import Transformer

APPEARS_SECONDS = 10.0  # in which a folder that another machine made is seen by this one


class FollowerRunFolder(RunFolder):
    """A `RunFolder` of which the first process writes everything.

    >>> from pathlib import Path
    >>> from phasor.config.recipe import Recipe
    >>> with FollowerRunFolder(Path("runs/lm-1"), Recipe(), resume=False) as run:
    ...     run.log(10, loss=2.5)
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check_visible(self, token: str) -> None:
        """Refuse a folder that is not the one the first process has made and written a token to."""
        end = time.monotonic() + APPEARS_SECONDS
        while self.read_token() != token:
            if time.monotonic() > end:
                raise ValueError(
                    f"{self.path.resolve()} is not on all machines of the run: "
                    "Recipe.out has to be a folder that they share"
                )
            time.sleep(0.1)

    def undo(self) -> None:
        pass

    def start(self, step: int) -> None:
        pass

    def log(self, step: int, **values: Any) -> None:
        pass

    def record_checkpoint(self, step: int) -> None:
        pass

    def sync(self) -> None:
        pass

    def keep_tokenizer(self, model: Transformer) -> None:
        pass

    def write_folder(self, name: str, write: Callable[[Path], None]) -> None:
        pass

    def finish(self, model: Transformer, sample: str | None, sources: list[TensorSource] | None = None) -> None:
        for shard in shard_sources(sources or []):
            for source in shard:
                source.make()

    def plot(self) -> None:
        pass


class SilentProgress(TrainingProgress):
    """Reports nothing, since the first process does.

    >>> SilentProgress().on_message("step 1 is skipped")
    """

    def on_message(self, message: str) -> None:
        pass

    def on_start(self, summary: RunSummary) -> None:
        pass
