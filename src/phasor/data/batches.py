"""Batches by their index: `batches[i]` depends on `i` and on nothing that happened before.

So a run resumes by knowing an integer, and several processes each take their share of the same batch. An epoch is
`per_epoch` batches, which hold every example exactly once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch as Batch
from phasor.data.order import epoch_order
from phasor.data.positions import GivenPositions, IntArray
from phasor.data.prefetch import Prefetcher
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds

PREDICTED, MASKED, REPLACED = 0.15, 0.8, 0.9  # share of tokens predicted; of them masked; masked or replaced


class Batches:
    """The batches of a store for a recipe's task: packed rows for "lm" and "mlm", pairs by length for "translation".

    `shuffled=False` keeps the order of the store, for evaluation. Rows have the positions that the recipe asks for;
    some are for `training`, and coupled ones need the `tokenizer`. The masks of "mlm" need `vocab_size`.

    >>> import tempfile
    >>> from phasor.config.recipe import DataConfig
    >>> from phasor.data.store import prepare
    >>> recipe = Recipe(data=DataConfig(train=__file__, tokenizer="bytes", sequence_length=64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     batches = Batches(prepare(recipe, folder).train, recipe)
    >>> batches[3].tokens.shape[1], torch.equal(batches[3].tokens, batches[3].tokens)
    (64, True)
    """

    def __init__(
        self,
        store: TokenStore,
        recipe: Recipe,
        seed: int | None = None,
        *,
        special: SpecialIds | None = None,
        vocab_size: int | None = None,
        tokenizer: Any = None,
        shuffled: bool = True,
        training: bool = False,
    ) -> None:
        seed = recipe.train.seed if seed is None else seed
        special = special or SpecialIds()
        self.workers = recipe.data.workers
        positions = GivenPositions.of(recipe.data, seed, tokenizer, training)
        self.source: Pairs | Rows
        if recipe.task == "translation":
            self.source = Pairs(store, recipe, seed, special, shuffled)
        elif recipe.task == "lm":
            self.source = Rows(store, recipe, seed, special, shuffled, positions)
        elif vocab_size is None or special.mask is None:
            raise ValueError("masking needs a vocabulary's size and its mask token")
        else:
            self.source = Rows(store, recipe, seed, special, shuffled, positions, vocab_size)
        self.per_epoch = self.source.per_epoch
        self.longest = self.source.longest  # tokens of the longest sequence, within one document and one row

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"steps count from 0, and {step} is below")
        return self.source.make_batch(*divmod(step, self.per_epoch))

    def stream(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches from one step to before another, prefetched by threads where the recipe has workers."""
        prefetcher = Prefetcher(self.__getitem__, self.workers)
        try:
            for step in range(start, stop):
                prefetcher.request(range(step, min(step + 1 + 2 * self.workers, stop)))
                yield prefetcher.take(step)
        finally:
            prefetcher.close(wait=True)


class Epoch(NamedTuple):
    """The order of one epoch."""

    order: IntArray  # of examples
    batches: IntArray  # the order of rows, or of batches of pairs
    ends: IntArray | None = None  # where each example ends, of those that are packed


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


def example_order(count: int, seed: int | str, epoch: int, shuffled: bool) -> IntArray:
    return epoch_order(count, seed, epoch).all() if shuffled else np.arange(count)


def token_bounds(sizes: IntArray, max_tokens: int) -> list[int]:
    """Where batches begin in sorted sizes, so that each has at most `max_tokens` tokens when padded, or one example.

    >>> token_bounds(np.array([1, 1, 2, 2, 5, 9]), 6)
    [0, 3, 4, 5, 6]
    """
    bounds = [0]
    while bounds[-1] < len(sizes):
        start = bounds[-1]
        room = sizes[start : start + max_tokens // max(1, int(sizes[start]))]
        fits = int(np.count_nonzero(room * np.arange(1, len(room) + 1) <= max_tokens))
        bounds.append(start + max(1, fits))
    return bounds
