"""What a classifier labels, and where its labels stand. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from phasor.config.schema import Config


class ClassifyConfig(Config):
    """Labels of whole texts (`of` "sequence") or of their words ("token").

    A JSON line of a text has it under `data.field`, the second text of a pair under `pair_field` and its label under
    `label_field`; one of words has lists of equal length under `words_field` and `labels_field`. `labels` are the names
    in order; without it they are those of `init_from`'s head, or those of the data, sorted.

    >>> ClassifyConfig(labels=("negative", "positive")).of
    'sequence'
    """

    of: Literal["sequence", "token"] = "sequence"
    label_field: str = "label"
    pair_field: str = "text_pair"
    words_field: str = "words"
    labels_field: str = "labels"
    labels: tuple[str, ...] = ()

    def check(self) -> None:
        for name in ("label_field", "pair_field", "words_field", "labels_field"):
            if getattr(self, name) == "":
                raise ValueError(f"ClassifyConfig.{name} must name a field, not ''")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("ClassifyConfig.labels names a label twice")

    @property
    def head(self) -> str:
        """The kind of head that gives the scores."""
        return f"{self.of}-classifier"
