"""Whole examples packed into rows, of which some tokens are trained: conversations, and pairs of them."""

from __future__ import annotations

import bisect
import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.order import Epoch, IntArray, example_order
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class PackedRows:
    """Rows of whole examples, each of its documents attending to itself; tokens predict the next of their document.

    An example has `documents` of two sides each: tokens, and 1 where one is trained. Which lengths share a row depends
    on the lengths alone, so that every epoch has as many rows, with other examples of these lengths. Rows are dealt out
    evenly; what a row or a batch lacks is padding. Documents have the ids 0 to `most - 1` in the order of the row, and
    padding the next one.
    """

    def __init__(
        self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool, documents: int = 1
    ) -> None:
        self.store, self.seed, self.special, self.shuffled, self.documents = store, seed, special, shuffled, documents
        lengths = np.maximum(store.lengths[:, 0::2] - 1, 0)  # the last token of a document is only a target
        self.sizes = lengths.sum(axis=1)
        self.longest = int(lengths.max())
        self.packing = pack(np.sort(self.sizes)[::-1], documents * recipe.data.sequence_length)
        rows = len(self.packing.starts) - 1
        self.length = int(self.packing.ends.max())
        self.most = documents * int(np.diff(self.packing.starts).max())
        self.rows, self.per_epoch = rows, -(-rows // max(1, recipe.train.batch_tokens // self.length))
        self.batch_rows = -(-rows // self.per_epoch)
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, number: int) -> Epoch:
        order = example_order(len(self.store), self.seed, number, self.shuffled)
        rows = example_order(self.rows, f"rows {self.seed}", number, self.shuffled)
        return Epoch(order[np.argsort(-self.sizes[order], kind="stable")], rows)

    def examples(self, number: int, index: int) -> list[IntArray]:
        """The examples of each row of a batch, in their order."""
        epoch, starts = self.epoch(number), self.packing.starts
        first, last = (place * self.rows // self.per_epoch for place in (index, index + 1))
        return [epoch.order[self.packing.items[starts[row] : starts[row + 1]]] for row in epoch.batches[first:last]]

    def make_batch(self, number: int, index: int) -> Batch:
        return Batch.from_arrays(self.arrays(self.examples(number, index)))

    def arrays(self, examples: list[IntArray]) -> dict[str, NDArray[Any]]:
        """The arrays of a batch with these examples in its rows."""
        shape = (self.batch_rows, self.length)
        tokens, targets = (np.full(shape, self.special.pad, np.int64) for _ in range(2))
        weights, document_ids = np.zeros(shape, np.float32), np.full(shape, self.most)
        for row, members in enumerate(examples):
            end = 0
            for number, example in enumerate(members):
                sides = self.store[example]
                for document in range(self.documents):
                    ids, trained = sides[2 * document], sides[2 * document + 1]
                    place = row, slice(end, end + len(ids) - 1)
                    tokens[place], targets[place], weights[place] = ids[:-1], ids[1:], trained[1:]
                    document_ids[place] = number * self.documents + document
                    end += len(ids) - 1
        return {"tokens": tokens, "targets": targets, "weights": weights, "document_ids": document_ids}


class PairedRows(PackedRows):
    """Rows of preference pairs, whose documents are the preferred and the rejected side in turn.

    `reference` are the log-probabilities of both by a reference, once these are known.
    """

    def __init__(self, store: TokenStore, recipe: Recipe, seed: int, special: SpecialIds, shuffled: bool) -> None:
        super().__init__(store, recipe, seed, special, shuffled, documents=2)
        self.reference: NDArray[np.float32] | None = None  # [examples, 2]

    def arrays(self, examples: list[IntArray]) -> dict[str, NDArray[Any]]:
        arrays = super().arrays(examples)
        weights = np.zeros((self.batch_rows, self.most // 2), np.float32)
        reference = np.zeros((self.batch_rows, self.most), np.float32)
        for row, members in enumerate(examples):
            weights[row, : len(members)] = 1
            if self.reference is not None:
                reference[row, : 2 * len(members)] = self.reference[members].flatten()
        return arrays | {"trained": arrays["weights"], "weights": weights, "reference": reference}


class Packing(NamedTuple):
    """Which items share a row: those of row `r` are `items[starts[r]:starts[r + 1]]`, and fill it up to `ends[r]`."""

    items: IntArray
    starts: IntArray
    ends: IntArray


def pack(sizes: IntArray, capacity: int) -> Packing:
    """Pack items into rows by best fit; their sizes decrease, and each fits into a row.

    >>> packing = pack(np.array([6, 5, 3, 2, 2]), 8)
    >>> np.split(packing.items, packing.starts[1:-1]), packing.ends
    ([array([0, 3]), array([1, 2]), array([4])], array([8, 8, 2]))
    """
    rows_with: dict[int, list[int]] = {}  # rows by the room they have
    rooms: list[int] = []  # that any row has, sorted
    row_of = np.empty(len(sizes), np.int64)
    ends: list[int] = []  # of rows
    for item, size in enumerate(sizes.tolist()):
        found = bisect.bisect_left(rooms, size)
        if found == len(rooms):
            row, room = len(ends), capacity
            ends.append(0)
        else:
            room = rooms[found]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[found]
        row_of[item], ends[row] = row, capacity - room + size
        if room - size not in rows_with:
            bisect.insort(rooms, room - size)
            rows_with[room - size] = []
        rows_with[room - size].append(row)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(ends)))])
    return Packing(np.argsort(row_of, kind="stable"), starts, np.array(ends))
