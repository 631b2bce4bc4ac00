"""Batches of anchors, with the texts that belong to each and those that do not."""

from __future__ import annotations

import numpy as np
import torch

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.by_length import LengthBatches
from phasor.data.order import IntArray
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds

ANCHOR, POSITIVE, NEGATIVE = range(3)  # the sides of an example; the last may be empty


class EmbeddingBatches(LengthBatches):
    """Examples of about the same length together: anchors `[B, T]`, candidates `[B, K, S]`, the positive first."""

    def __init__(self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool) -> None:
        self.sides = (POSITIVE, NEGATIVE) if store.lengths[:, NEGATIVE].any() else (POSITIVE,)
        lengths = store.lengths.max(axis=1)
        super().__init__(store, recipe, seed, special, shuffled, lengths, rows=1 + len(self.sides))

    def collate(self, examples: IntArray) -> Batch:
        anchors, real = self.side(ANCHOR, examples)
        parts = [self.side(side, examples) for side in self.sides]
        width = max(tokens.shape[1] for tokens, _ in parts)
        shape = (len(examples), len(parts), width)
        candidates, mask = np.full(shape, self.special.pad, np.int64), np.zeros(shape, bool)
        for place, (tokens, own) in enumerate(parts):
            candidates[:, place, : tokens.shape[1]], mask[:, place, : tokens.shape[1]] = tokens, own
        return Batch(
            tokens=torch.from_numpy(anchors),
            targets=torch.zeros(len(examples), 1, dtype=torch.int64),
            weights=torch.ones(len(examples), 1),
            attention_mask=torch.from_numpy(real),
            candidates=torch.from_numpy(candidates),
            candidate_mask=torch.from_numpy(mask),
        )
