"""The order of examples: a shuffle that is computed and not stored, and batches of about one length."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
ROUNDS = 6


class Permutation:
    """A keyed permutation of the integers below `count`, in constant memory.

    The two halves of an integer's bits change each other alternately (a Feistel network): each round can be undone,
    so no two integers give the same. The network covers a power of four; integers that land at `count` or above go
    through it again until they do not.

    >>> order = Permutation(10, seed=3)
    >>> sorted(order[i] for i in range(10)) == list(range(10))
    True
    """

    def __init__(self, count: int, seed: int | str) -> None:
        if count < 0:
            raise ValueError(f"a permutation needs a count of at least 0, not {count}")
        self.count = count
        self.half = np.uint64(max(1, -(-max(1, count - 1).bit_length() // 2)))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        digest = hashlib.blake2b(f"{seed}".encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(digest, dtype="<u8")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"the index {index} is not below {self.count}")
        return int(self.at(np.array([index]))[0])

    def at(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The images of many integers."""
        values = self._permute(indices.astype(np.uint64))
        outside = values >= self.count
        while outside.any():
            values[outside] = self._permute(values[outside])
            outside = values >= self.count
        return values.astype(np.int64)

    def all(self) -> NDArray[np.int64]:
        """The whole order at once."""
        return self.at(np.arange(self.count))

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self.half, values & self.mask
        for key in self.keys:
            left, right = right, left ^ (mix_bits(right + key) & self.mask)
        return (left << self.half) | right


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit given (the finish of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_order(count: int, seed: int | str, epoch: int) -> Permutation:
    """The order of one epoch: it depends on the arguments alone.

    >>> sorted(epoch_order(5, seed=0, epoch=3).all().tolist())
    [0, 1, 2, 3, 4]
    """
    return Permutation(count, f"{seed}, epoch {epoch}")


class Epoch(NamedTuple):
    """The order of one epoch."""

    order: IntArray  # of examples
    batches: IntArray  # the order of rows, or of batches of pairs
    ends: IntArray | None = None  # where each example ends, of those that are packed


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
