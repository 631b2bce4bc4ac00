"""Documents packed end to end into rows, whose tokens predict the next of their document or masked ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.order import Epoch, example_order
from phasor.data.positions import GivenPositions
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds

PREDICTED, MASKED, REPLACED = 0.15, 0.8, 0.9  # share of tokens predicted; of them masked; masked or replaced


class Rows:
    """Documents end to end in the epoch's order, cut into rows; a row's tokens predict the next of their document.

    Rows are shuffled, so that a batch does not come from one long document, and dealt out evenly, so that an epoch
    does not end in a batch of a few. What is left of the last row, and of a batch with a row less than others, is
    padding. With `vocab_size` some tokens are predicted instead: of those, 80 % are masked, 10 % replaced, 10 % left.
    """

    def __init__(
        self,
        store: TokenStore,
        recipe: Recipe,
        seed: int,
        special: SpecialIds,
        shuffled: bool,
        positions: GivenPositions | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.store, self.seed, self.special, self.shuffled, self.positions = store, seed, special, shuffled, positions
        self.vocab_size = vocab_size
        self.shift = 1 if vocab_size is None else 0  # tokens of a document that are only targets
        self.sizes = np.maximum(store.lengths[:, 0] - self.shift, 0)
        self.total = int(self.sizes.sum())
        if self.total == 0:
            raise ValueError("there is not a single token to predict")
        self.length = min(recipe.data.sequence_length, self.total)  # a longer row would only have more padding
        self.longest = min(self.length, int(self.sizes.max()))
        self.rows = -(-self.total // self.length)
        self.per_epoch = -(-self.rows // max(1, recipe.train.batch_tokens // self.length))
        self.batch_rows = -(-self.rows // self.per_epoch)
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, number: int) -> Epoch:
        order = example_order(len(self.store), self.seed, number, self.shuffled)
        rows = example_order(self.rows, f"rows {self.seed}", number, self.shuffled)
        return Epoch(order, rows, np.cumsum(self.sizes[order]))

    def make_batch(self, number: int, index: int) -> Batch:
        epoch = self.epoch(number)
        assert epoch.ends is not None
        first, last = (place * self.rows // self.per_epoch for place in (index, index + 1))
        shape = (self.batch_rows, self.length)
        rows = np.full(self.batch_rows, self.rows)  # where a row is missing: one beyond the end, which is padding
        rows[: last - first] = epoch.batches[first:last]
        places = rows[:, None] * self.length + np.arange(self.length)
        real = places < self.total
        documents = np.full(shape, len(epoch.order))  # padding is a separate document
        documents[real] = np.searchsorted(epoch.ends, places[real], side="right")
        examples = epoch.order[documents[real]]
        address = self.store.ends[0][examples] + places[real] - (epoch.ends[documents[real]] - self.sizes[examples])
        tokens, targets = (np.full(shape, self.special.pad, np.int64) for _ in range(2))
        tokens[real] = self.store.tokens[0][address]
        targets[real] = self.store.tokens[0][address + self.shift]
        arrays: dict[str, NDArray[Any]] = {"tokens": tokens, "targets": targets, "weights": real.astype(np.float32)}
        apart, step = documents - documents[:, :1], number * self.per_epoch + index
        if apart.any():  # rows of one document each are quicker without
            arrays["document_ids"] = apart
        if self.vocab_size is not None:
            arrays |= mask_tokens(tokens, real, [self.seed, step], self.special, self.vocab_size)
        batch = Batch.from_arrays(arrays)
        if self.positions is None:
            return batch
        positions = torch.from_numpy(self.positions.draw(documents, self.store, real, address, step))
        return dataclasses.replace(batch, positions=positions, length=self.positions.length)


def mask_tokens(
    tokens: NDArray[Any], real: NDArray[np.bool_], seed: list[int], special: SpecialIds, vocab_size: int
) -> dict[str, NDArray[Any]]:
    """Tokens with some of them masked, and the weights of those to predict; never a special token."""
    draw = np.random.default_rng(seed)
    fixed = [i for i in (special.pad, special.bos, special.eos, special.mask) if i is not None]
    free = real & ~np.isin(tokens, fixed)
    chance, fate = draw.random(tokens.shape), draw.random(tokens.shape)
    others = draw.integers(vocab_size, size=tokens.shape)
    predicted = free & (chance < PREDICTED)
    if free.any() and not predicted.any():  # a short batch predicts one token at least
        predicted = free & (chance == chance[free].min())
    changed = np.where(fate < MASKED, cast(int, special.mask), np.where(fate < REPLACED, others, tokens))
    changed = np.where(np.isin(changed, [i for i in fixed if i != special.mask]), tokens, changed)
    return {"tokens": np.where(predicted, changed, tokens), "weights": predicted.astype(np.float32)}
