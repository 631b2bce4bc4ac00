"""Batches by their index: `batches[i]` depends on `i` and on nothing that happened before.

So a run resumes by knowing an integer, and several processes each take their share of the same batch. An epoch is
`per_epoch` batches, which hold every example exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config.model import Shape
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch as Batch
from phasor.data.examples import examples_of
from phasor.data.positions import GivenPositions
from phasor.data.prefetch import Prefetcher
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class Batches:
    """The batches of a store for a recipe's task, of the kind that its examples make.

    `shuffled=False` keeps the order of the store, for evaluation. Rows have the positions that the recipe asks for;
    some are for `training`, and coupled ones need the `tokenizer`. Masking needs `vocab_size`. `shape` is that of the
    model, where it is known better than from the recipe.

    >>> import tempfile
    >>> import torch
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
        shape: Shape | None = None,
    ) -> None:
        seed = recipe.train.seed if seed is None else seed
        special = special or SpecialIds()
        self.workers = recipe.data.workers
        positions = GivenPositions.of(recipe.data, seed, tokenizer, training)
        self.source = examples_of(recipe, shape).batches(
            store, seed, special, shuffled=shuffled, positions=positions, vocab_size=vocab_size
        )
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
