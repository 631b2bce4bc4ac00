"""Decoding steps of the engine as CUDA graphs, each for one number of rows.

A step reads the tokens of the step before on the device, so that it is launched before the host has read them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phasor.generation.engine.row import EngineRow
from phasor.generation.engine.scheduler import EngineBatch
from phasor.generation.runners import StepSpec, new_runner, runs_cuda_graph
from phasor.generation.runners.cuda_graph import CudaGraphRunner, model_identity, model_why_not
from phasor.kv_cache.page_table import FIRST_WIDTH
from phasor.kv_cache.paged import PagedKVCache, round_up
from phasor.kv_cache.static_paged import StaticPagedKVCache, new_choices
from phasor.transformer import Transformer


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that computes the next token of rows.

    `logits` `[B, vocab]` hold until the next step, and `chosen` has the likeliest tokens and their logits, on the host
    once `copied`.
    """

    rows: list[EngineRow]
    logits: Tensor
    chosen: Tensor
    copied: torch.cuda.Event | None
    needs_logits: bool  # the next token of some row is not just the likeliest, or begins several rows

    def read(self) -> list[tuple[int, float]]:
        """Wait for the likeliest tokens and their logits."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, best = self.chosen[:, : len(self.rows)]
        return list(zip(tokens.view(torch.int64).tolist(), best.tolist(), strict=True))


class ModelGraphs:
    """The graphs of a model as it was when the first one was captured, by numbers of rows and of pages.

    None stands for steps that run eagerly. `chosen` is what the latest of the steps chose.
    """

    def __init__(self, model: Transformer, max_rows: int) -> None:
        self.identity = model_identity(model)
        self.chosen = new_choices(max_rows, model.tokens.weight.device)
        self.runners: dict[tuple[int, int], CudaGraphRunner | None] = {}

    def is_outdated(self, model: Transformer) -> bool:
        """Whether the model has other weights or modules than its graphs."""
        return model_why_not(model) is not None or self.identity != model_identity(model)


class GraphSteps:
    """The graphs of the models of an engine: numbers of rows and of pages are rounded up to powers of two."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.graphs: WeakKeyDictionary[Transformer, ModelGraphs | None] = WeakKeyDictionary()

    def refresh(self) -> None:
        """Drop the graphs of models that have changed."""
        for model, graphs in list(self.graphs.items()):
            if graphs is not None and graphs.is_outdated(model):
                del self.graphs[model]

    def runner(self, model: Transformer, rows: int, blocks: int) -> CudaGraphRunner | None:
        """The runner of steps of as many rows of a model, with as many pages each; None where they run eagerly."""
        if model not in self.graphs:
            captured = runs_cuda_graph(StepSpec(model, 1, pages=StaticPagedKVCache(self.cache, 1, 1)))  # else none is
            self.graphs[model] = ModelGraphs(model, self.cache.max_rows) if captured else None
        graphs = self.graphs[model]
        if graphs is None:
            return None
        if (rows, blocks) not in graphs.runners:
            pages = StaticPagedKVCache(self.cache, rows, blocks, graphs.chosen)
            graphs.runners[rows, blocks] = self._capture(StepSpec(model, rows, pages=pages))
        return graphs.runners[rows, blocks]

    def _capture(self, spec: StepSpec) -> CudaGraphRunner | None:
        if not runs_cuda_graph(spec):
            return None
        try:
            return new_runner(spec)
        except Exception as error:  # such as too little memory: requests go on without it
            warnings.warn(f"steps of {spec.rows} rows run eagerly, as no CUDA graph: {error}", stacklevel=2)
            return None

    def launch(self, batch: EngineBatch) -> LaunchedStep | None:
        """Begin the step that reads the last token of each row of a batch; None where it has to run eagerly."""
        cached = [row.cached for row in batch.rows if row.cached is not None]
        most = max(row.count for row in cached) // self.cache.page_size + 1
        rows, blocks = min(round_up(len(cached)), self.cache.max_rows), max(FIRST_WIDTH, round_up(most))
        runner = self.runner(batch.model, rows, blocks)
        if runner is None:
            return None
        pages = cast(StaticPagedKVCache, runner.buffers.cache)
        known = [row.text[row.count] if row.launched is None else -1 - row.launched[1] for row in batch.rows]
        pages.set_rows(cached, known)
        logits = runner.run()[: len(cached)]
        self.cache.commit(cached, batch.new)
        chosen, copied = to_host(pages.chosen)
        needs_logits = not all(row.handle.is_argmax_only and not row.followers for row in batch.rows)
        step = LaunchedStep(batch.rows, logits, chosen, copied, needs_logits)
        for i, row in enumerate(batch.rows):
            row.launched = step, i
        return step


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a tensor on the host, and an event after which it is there; None where it is at once."""
    if not x.is_cuda:
        return x.clone(), None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))
    return host, copied
