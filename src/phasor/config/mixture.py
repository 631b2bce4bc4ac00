"""The sources of a mixture."""

from __future__ import annotations

from phasor.config.schema import Config, positive


class MixtureSource(Config):
    """A file or folder of a mixture; of the tokens of an epoch it has the share `weight / (the sum of all weights)`.

    >>> MixtureSource(path="books.jsonl", weight=3).weight
    3.0
    """

    path: str
    weight: float = 1.0

    def check(self) -> None:
        positive(self, "weight")
        if not self.path:
            raise ValueError("MixtureSource.path must not be empty text")
