"""Updates as CUDA graphs: where a model is small, a device waits for the host to launch kernels one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.data.batch import Batch

Key = tuple[tuple[str, tuple[int, ...]], ...]


class Captured(NamedTuple):
    """What the device does for batches of one shape, where it reads them from, and where the result is."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    result: Tensor


class Graphs:
    """Calls a function of a batch; from the second batch of a shape on by replaying what it did on the device.

    The function must not look at values on the host. The result of a replay is overwritten by the next one.
    """

    def __init__(self, function: Callable[[Batch], Tensor]) -> None:
        self.function = function
        self.seen: set[Key] = set()
        self.captured: dict[Key, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> Tensor:
        key = tuple((name, tuple(tensor.shape)) for name, tensor in batch.tensors().items())
        if key not in self.seen:
            self.seen.add(key)
            return self.function(batch)
        if key not in self.captured:
            self.captured[key] = self.capture(batch)
        made = self.captured[key]
        for name, tensor in made.batch.tensors().items():
            tensor.copy_(batch.tensors()[name])
        made.graph.replay()
        return made.result

    def capture(self, batch: Batch) -> Captured:
        """Record what the function does for a batch; nothing is computed."""
        held = Batch(**{name: tensor.clone() for name, tensor in batch.tensors().items()})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = self.function(held)
        return Captured(graph, held, result)
