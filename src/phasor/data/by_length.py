"""Examples of about the same length together in a batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.order import Epoch, IntArray, example_order, token_bounds
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class LengthBatches:
    """Examples of about the same length together, as many as fit into a batch with their padding.

    `lengths` are tokens of the longest row of each example, which has `rows` of them. Examples are sorted by length,
    and those of one length shuffled anew each epoch. Where batches begin and end then depends on the lengths alone, so
    that every epoch has as many, in a new order.
    """

    def __init__(
        self,
        store: TokenStore,
        recipe: Recipe,
        seed: int,
        special: SpecialIds,
        shuffled: bool,
        lengths: IntArray,
        rows: int = 1,
    ) -> None:
        self.store, self.seed, self.special, self.shuffled = store, seed, special, shuffled
        self.multiple = recipe.data.pad_to_multiple_of
        self.sizes = self.round_up(lengths)
        self.longest = int(lengths.max())
        self.bounds = token_bounds(np.sort(self.sizes) * rows, recipe.train.batch_tokens)
        self.per_epoch = len(self.bounds) - 1
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, number: int) -> Epoch:
        order = example_order(len(self.store), self.seed, number, self.shuffled)
        batches = example_order(self.per_epoch, f"batches {self.seed}", number, self.shuffled)
        return Epoch(order[np.argsort(self.sizes[order], kind="stable")], batches)

    def make_batch(self, number: int, index: int) -> Batch:
        """A batch by its epoch and its index in that."""
        epoch = self.epoch(number)
        place = epoch.batches[index]
        return self.collate(epoch.order[self.bounds[place] : self.bounds[place + 1]])

    def collate(self, examples: IntArray) -> Batch:
        """The batch of some examples."""
        raise NotImplementedError

    def round_up(self, sizes: Any) -> Any:
        """Sizes as multiples of `data.pad_to_multiple_of`."""
        return -(-sizes // self.multiple) * self.multiple

    def side(
        self, side: int, examples: IntArray, shift: int = 0, fill: int | None = None
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """Rows of one side, padded at the end, and where they are real; `shift` tokens of them are only targets."""
        lengths = self.store.lengths[examples, side]
        columns = np.arange(self.round_up(lengths.max() - shift) + shift)
        real = columns < lengths[:, None]
        tokens = np.full(real.shape, self.special.pad if fill is None else fill, np.int64)
        tokens[real] = self.store.tokens[side][(self.store.ends[side][examples][:, None] + columns)[real]]
        return tokens, real
