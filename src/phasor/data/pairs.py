"""Pairs of texts of about the same length together in a batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.order import Epoch, IntArray, example_order, token_bounds
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class Pairs:
    """Pairs of about the same length together, as many as fit into a batch with their padding.

    Examples are sorted by length, and those of one length shuffled anew each epoch. Where batches begin and end then
    depends on the lengths alone, so that every epoch has as many, in a new order.
    """

    def __init__(self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool) -> None:
        self.store, self.seed, self.special, self.shuffled = store, seed, special, shuffled
        self.multiple = recipe.data.pad_to_multiple_of
        self.sizes = self._round_up(np.maximum(store.lengths[:, 0], store.lengths[:, 1] - 1))
        self.longest = int(np.maximum(store.lengths[:, 0], store.lengths[:, 1] - 1).max())
        self.bounds = token_bounds(np.sort(self.sizes), recipe.train.batch_tokens)
        self.per_epoch = len(self.bounds) - 1
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, number: int) -> Epoch:
        order = example_order(len(self.store), self.seed, number, self.shuffled)
        batches = example_order(self.per_epoch, f"batches {self.seed}", number, self.shuffled)
        return Epoch(order[np.argsort(self.sizes[order], kind="stable")], batches)

    def make_batch(self, number: int, index: int) -> Batch:
        epoch = self.epoch(number)
        place = epoch.batches[index]
        examples = epoch.order[self.bounds[place] : self.bounds[place + 1]]
        source, source_attention_mask = self._side(0, examples, 0)
        target, target_attention_mask = self._side(1, examples, 1)
        return Batch(
            tokens=torch.from_numpy(target[:, :-1].copy()),
            targets=torch.from_numpy(target[:, 1:].copy()),
            weights=torch.from_numpy(target_attention_mask[:, 1:].astype(np.float32)),
            source=torch.from_numpy(source),
            source_attention_mask=torch.from_numpy(source_attention_mask),
        )

    def _round_up(self, sizes: Any) -> Any:
        return -(-sizes // self.multiple) * self.multiple

    def _side(self, side: int, examples: IntArray, shift: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Rows of one side, padded at the end, and where they are real; `shift` tokens of them are only targets."""
        lengths = self.store.lengths[examples, side]
        columns = np.arange(self._round_up(lengths.max() - shift) + shift)
        real = columns < lengths[:, None]
        tokens = np.full(real.shape, self.special.pad, np.int64)
        tokens[real] = self.store.tokens[side][(self.store.ends[side][examples][:, None] + columns)[real]]
        return tokens, real
