"""Anchors with a text that belongs to each, and perhaps one that does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from phasor.data.columns import read_columns
from phasor.data.dates import Split
from phasor.data.embedding_batches import EmbeddingBatches
from phasor.data.encoding import Report, Tokenizers, encode_texts
from phasor.data.examples.base import Examples
from phasor.data.split import Example, PlacedExample


class SimilarTexts(Examples):
    """An anchor, its positive and its negative, or no tokens where it has none; ended as the tokenizer ends texts."""

    sides = 3
    token_sides = (0, 1, 2)
    ends = "<bos> $A <eos>"
    unrelated = frozenset({"share_vocabulary"})
    unit = "text"
    batch_source = EmbeddingBatches

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        config = self.recipe.embed
        pair = config.anchor_field, config.positive_field
        for row in read_columns(path, self.recipe.data, (pair, (*pair, config.negative_field)), "similar texts"):
            names = (*pair, config.negative_field) if row.values.get(config.negative_field) is not None else pair
            yield PlacedExample([row.text(name) for name in names], row.where)

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterable[tuple[Any, ...]]:
        texts = [text for example in examples for text in example]
        encoded = iter(encode_texts(texts, tokenizers.target, True, tokenizers.special, report))
        for example in examples:
            sides = [next(encoded) for _ in example]
            yield (*sides, np.zeros(0, np.uint32)) if len(sides) < self.sides else tuple(sides)

    def origin(self) -> dict[str, Any]:
        return {"embed": self.recipe.embed.to_dict()}
