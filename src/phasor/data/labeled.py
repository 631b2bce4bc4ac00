"""Batches of texts with labels, one for each text or one for each of its words."""

from __future__ import annotations

import numpy as np
import torch

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.by_length import LengthBatches
from phasor.data.order import IntArray
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds

TOKENS, TYPES, LABELS = range(3)  # the sides of a labeled example


class LabeledBatches(LengthBatches):
    """Texts of about the same length together.

    Labels are stored as their number plus 1; 0 is that of tokens which do not count. A text's own label is a row of
    targets `[B, 1]`, those of words stand at their tokens `[B, T]`.
    """

    def __init__(self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool) -> None:
        super().__init__(store, recipe, seed, special, shuffled, store.lengths[:, TOKENS])
        self.of_words = recipe.classify.of == "token"

    def collate(self, examples: IntArray) -> Batch:
        tokens, real = self.side(TOKENS, examples)
        types, _ = self.side(TYPES, examples, fill=0)
        if self.of_words:
            labels, _ = self.side(LABELS, examples, fill=0)
        else:
            labels = self.store.tokens[LABELS][self.store.ends[LABELS][examples]][:, None].astype(np.int64)
        return Batch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(np.maximum(labels - 1, 0)),
            weights=torch.from_numpy((labels > 0).astype(np.float32)),
            attention_mask=torch.from_numpy(real),
            token_types=torch.from_numpy(types),
        )
