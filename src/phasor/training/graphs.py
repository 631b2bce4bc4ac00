"""Training steps as CUDA graphs: in a small model, launch overhead takes longer than the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.data.batch import Batch

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class StepGraph(NamedTuple):
    """The CUDA graph of a step on batches of one shape, the batch it reads and the tensor it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    result: Tensor


class StepGraphs:
    """Calls a function of a batch; from the second batch of a shape on by replaying a CUDA graph of it.

    The function must not look at values on the host. The result of a replay is overwritten by the next one.
    """

    def __init__(self, function: Callable[[Batch], Tensor]) -> None:
        self.function = function
        self.seen: set[Shapes] = set()
        self.graphs: dict[Shapes, StepGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> Tensor:
        key = tuple((name, tuple(tensor.shape)) for name, tensor in batch.tensors().items())
        if key not in self.seen:
            self.seen.add(key)
            return self.function(batch)
        if key not in self.graphs:
            self.graphs[key] = self.capture(batch)
        step = self.graphs[key]
        for name, tensor in step.batch.tensors().items():
            tensor.copy_(batch.tensors()[name])
        step.graph.replay()
        return step.result

    def capture(self, batch: Batch) -> StepGraph:
        """Capture what the function does for a batch; nothing is computed."""
        static = batch.map(Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = self.function(static)
        return StepGraph(graph, static, result)
