"""Documents as rows to evaluate on: each from its beginning, and apart from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from phasor.data.batch import Batch
from phasor.data.order import token_bounds
from phasor.data.positions import GivenPositions
from phasor.data.rows import mask_tokens
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds

SEED = 0  # of the masks


class DocumentBatches:
    """Every document in its own row, or in several if it has more than `length` tokens; batches by length.

    Training packs documents end to end and cuts rows wherever they are full. Here a document that fits into a row is
    never cut, so that its metrics do not depend on its neighbors. With `vocab_size` tokens are masked,
    always the same ones. `positions` are those that the model was trained with, where they are not ordinary.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from phasor.data.token_files import TokenWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TokenWriter(Path(folder), "texts", sides=1, vocab_size=99) as writer:
    ...         writer.add((np.arange(1, 7),), text_bytes=4)
    ...     batches = list(DocumentBatches(TokenStore(Path(folder), "texts", writer.describe()), 3, 64, SpecialIds()))
    >>> batches[0].tokens.tolist(), batches[0].targets.tolist()
    ([[4, 5, 0], [1, 2, 3]], [[5, 6, 0], [2, 3, 4]])
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        batch_tokens: int,
        special: SpecialIds,
        vocab_size: int | None = None,
        positions: GivenPositions | None = None,
    ) -> None:
        self.store, self.special, self.vocab_size, self.positions = store, special, vocab_size, positions
        self.shift = 1 if vocab_size is None else 0  # tokens of a document that are only targets
        whole = np.maximum(store.lengths[:, 0] - self.shift, 0)
        rows = -(-whole // length)
        document = np.repeat(np.arange(len(store)), rows)
        before = length * (np.arange(len(document)) - np.repeat(np.cumsum(rows) - rows, rows))
        sizes = np.minimum(whole[document] - before, length)
        order = np.argsort(sizes, kind="stable")
        self.starts, self.sizes = (store.ends[0][document] + before)[order], sizes[order]
        self.bounds = token_bounds(self.sizes, batch_tokens)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make_batch, range(len(self)))

    def make_batch(self, number: int) -> Batch:
        chosen = slice(self.bounds[number], self.bounds[number + 1])
        columns = np.arange(self.sizes[chosen].max())
        real = columns < self.sizes[chosen, None]
        address = (self.starts[chosen, None] + columns)[real]
        tokens, targets = (np.full(real.shape, self.special.pad, np.int64) for _ in range(2))
        tokens[real] = self.store.tokens[0][address]
        targets[real] = self.store.tokens[0][address + self.shift]
        arrays = {"tokens": tokens, "targets": targets, "weights": real.astype(np.float32)}
        if self.vocab_size is not None:
            arrays |= mask_tokens(tokens, real, [SEED, number], self.special, self.vocab_size)
        if not real.all():
            arrays["document_ids"] = (~real).astype(np.int64)  # padding is a separate document
        batch = Batch.from_arrays(arrays)
        if self.positions is None:
            return batch
        drawn = self.positions.draw((~real).astype(np.int64), self.store, real, address, number)
        return dataclasses.replace(batch, positions=torch.from_numpy(drawn), length=self.positions.length)
