"""Batches made before they are needed, by threads, and moved to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

from phasor.data.batch import Batch

Item = TypeVar("Item")


class BatchSequence(Protocol):
    """Batches by their index."""

    def __getitem__(self, index: int) -> Batch: ...


class Prefetcher(Generic[Item]):
    """Batches or the like by their index, made by `workers` threads after `request`; without threads, by `request`.

    >>> calls = []
    >>> prefetcher = Prefetcher(lambda index: calls.append(index), workers=0)
    >>> prefetcher.request(range(2, 4))
    >>> prefetcher.take(2), calls
    (None, [2, 3])
    """

    def __init__(self, make: Callable[[int], Item], workers: int) -> None:
        self.make = make
        self.pool = ThreadPoolExecutor(workers, "batches") if workers else None
        self.requested: dict[int, Item | Future[Item]] = {}

    def request(self, indices: Iterable[int]) -> None:
        """Make batches, or have threads make them, unless they were requested before."""
        for index in indices:
            if index not in self.requested:
                self.requested[index] = self.pool.submit(self.make, index) if self.pool else self.make(index)

    def take(self, index: int) -> Item:
        """A batch that was requested, once it is made."""
        batch = self.requested.pop(index)
        return batch.result() if isinstance(batch, Future) else batch

    def close(self, *, wait: bool = False) -> None:
        """Stop the threads; without `wait`, batches that they are making are not waited for."""
        if self.pool is not None:
            self.pool.shutdown(wait=wait, cancel_futures=True)


class StepBatches:
    """The batches of each optimizer step, prefetched and on the device.

    Step `step` takes `accumulation_steps` batches from `step * accumulation_steps` on; they depend on nothing else.
    With `workers`, as many threads make batches of later steps. Without, `prefetch` makes those of a step on the spot,
    which is best called while a device is busy. `share` is which part of each batch to take, and of how many.

    >>> numbers = torch.arange(10).view(10, 1, 1)
    >>> batches = [Batch(tokens=n, targets=n, weights=torch.ones(1, 1)) for n in numbers]
    >>> taken, count = StepBatches(batches, accumulation_steps=2, workers=0, device="cpu").take(3)
    >>> [int(batch.tokens) for batch in taken], count
    ([6, 7], 2.0)
    """

    def __init__(
        self,
        batches: BatchSequence,
        *,
        accumulation_steps: int,
        workers: int,
        device: torch.device | str,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.batches, self.accumulation_steps, self.device = batches, accumulation_steps, torch.device(device)
        self.share = share
        self.prefetcher = Prefetcher(self._make, workers)
        self.lookahead = accumulation_steps + workers

    def prefetch(self, step: int) -> None:
        """Make, or have threads make, the batches of a step."""
        first = step * self.accumulation_steps
        self.prefetcher.request(range(first, first + self.lookahead))

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The batches of a step, on the device, and how many tokens are predicted in them, by all processes."""
        self.prefetch(step)
        first = step * self.accumulation_steps
        batches = [self.prefetcher.take(index) for index in range(first, first + self.accumulation_steps)]
        counts = (batch.count if batch.whole_count is None else batch.whole_count for batch in batches)
        return [batch.to(self.device) for batch in batches], sum(counts)

    def close(self) -> None:
        """Stop the threads; batches that they are making are not waited for."""
        self.prefetcher.close()

    def _make(self, index: int) -> Batch:
        batch = self.batches[index]
        if self.share[1] > 1:
            batch = batch.share(*self.share)
        return batch.pin_memory() if self.device.type == "cuda" else batch
