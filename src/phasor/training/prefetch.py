"""The batches of each update, made ahead of time and moved to the device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from phasor.data.batch import Batch


class Numbered(Protocol):
    """Batches by their number."""

    def __getitem__(self, index: int) -> Batch: ...


class Feed:
    """Update `step` takes the batches `step * accumulate` and the following; nothing else decides what they are.

    With `workers`, as many threads make batches ahead. Without, `prepare` makes those of an update on the spot, which
    is best called while a device is busy.

    >>> numbers = torch.arange(10).view(10, 1, 1)
    >>> batches = [Batch(tokens=n, targets=n, weights=torch.ones(1, 1)) for n in numbers]
    >>> taken, count = Feed(batches, accumulate=2, workers=0, device="cpu").take(3)
    >>> [int(batch.tokens) for batch in taken], count
    ([6, 7], 2.0)
    """

    def __init__(self, batches: Numbered, *, accumulate: int, workers: int, device: torch.device | str) -> None:
        self.batches, self.accumulate, self.device = batches, accumulate, torch.device(device)
        self.pool = ThreadPoolExecutor(workers, "batches") if workers else None
        self.ahead = accumulate + workers
        self.coming: dict[int, Batch | Future[Batch]] = {}

    def prepare(self, step: int) -> None:
        """Make, or have made, the batches of an update."""
        first = step * self.accumulate
        for index in range(first, first + (self.ahead if self.pool else self.accumulate)):
            if index not in self.coming:
                self.coming[index] = self.pool.submit(self._make, index) if self.pool else self._make(index)

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The batches of an update, on the device, and how many tokens are predicted in them."""
        self.prepare(step)
        first = step * self.accumulate
        coming = [self.coming.pop(index) for index in range(first, first + self.accumulate)]
        found = [batch.result() if isinstance(batch, Future) else batch for batch in coming]
        return [batch.to(self.device) for batch in found], sum(batch.count for batch in found)

    def close(self) -> None:
        """Let the threads go; what they are making is not waited for."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, index: int) -> Batch:
        batch = self.batches[index]
        return batch.pinned() if self.device.type == "cuda" else batch
