"""Batches of pairs: a source, and the target that is predicted from it."""

from __future__ import annotations

import numpy as np
import torch

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.by_length import LengthBatches
from phasor.data.order import IntArray
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class Pairs(LengthBatches):
    """Pairs of about the same length together; a decoder reads the target without its last token."""

    def __init__(self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool) -> None:
        lengths = np.maximum(store.lengths[:, 0], store.lengths[:, 1] - 1)
        super().__init__(store, recipe, seed, special, shuffled, lengths)

    def collate(self, examples: IntArray) -> Batch:
        source, source_attention_mask = self.side(0, examples)
        target, target_attention_mask = self.side(1, examples, shift=1)
        return Batch(
            tokens=torch.from_numpy(target[:, :-1].copy()),
            targets=torch.from_numpy(target[:, 1:].copy()),
            weights=torch.from_numpy(target_attention_mask[:, 1:].astype(np.float32)),
            source=torch.from_numpy(source),
            source_attention_mask=torch.from_numpy(source_attention_mask),
        )
