"""Decoding steps of the engine as CUDA graphs, each for one number of rows.

A step reads the tokens of the step before on the device, so that it is launched before the host has read them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from phasor.generation.engine.row import EngineRow
from phasor.generation.engine.scheduler import EngineBatch
from phasor.generation.runners import StepSpec, new_runner, runs_cuda_graph
from phasor.generation.runners.cuda_graph import CudaGraphRunner, model_identity, model_why_not
from phasor.kv_cache.page_table import FIRST_WIDTH, to_device
from phasor.kv_cache.paged import PagedKVCache, round_up
from phasor.kv_cache.static_paged import StaticPagedKVCache
from phasor.transformer import Transformer


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that computes the next token of rows.

    `logits` `[B, vocab]` hold until the next step, `tokens` `[B]` are the likeliest ones, and `found` has them with
    their logits, `[2, B]` on the host once `copied`.
    """

    rows: list[EngineRow]
    logits: Tensor
    tokens: Tensor
    found: Tensor
    copied: torch.cuda.Event | None
    needs_logits: bool  # the next token of some row is not just the likeliest, or begins several rows

    def read(self) -> list[tuple[int, float]]:
        """Wait for the likeliest tokens and their logits."""
        if self.copied is not None:
            self.copied.synchronize()
        best, tokens = self.found.tolist()
        return list(zip(map(int, tokens), best, strict=True))


class ModelGraphs:
    """The graphs of a model as it was when the first one was captured, by numbers of rows and of pages.

    None stands for steps that run eagerly.
    """

    def __init__(self, model: Transformer) -> None:
        self.identity = model_identity(model)
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
            captured = runs_cuda_graph(self._spec(model, 1, 1))  # else no number of rows is
            self.graphs[model] = ModelGraphs(model) if captured else None
        graphs = self.graphs[model]
        if graphs is None:
            return None
        if (rows, blocks) not in graphs.runners:
            graphs.runners[rows, blocks] = self._capture(self._spec(model, rows, blocks))
        return graphs.runners[rows, blocks]

    def _capture(self, spec: StepSpec) -> CudaGraphRunner | None:
        if not runs_cuda_graph(spec):
            return None
        try:
            return new_runner(spec)
        except Exception as error:  # such as too little memory: requests go on without it
            warnings.warn(f"steps of {spec.rows} rows run eagerly, as no CUDA graph: {error}", stacklevel=2)
            return None

    def _spec(self, model: Transformer, rows: int, blocks: int) -> StepSpec:
        return StepSpec(model, rows, pages=StaticPagedKVCache(self.cache, rows, blocks))

    def launch(self, batch: EngineBatch) -> LaunchedStep | None:
        """Begin the step that reads the last token of each row of a batch; None where it has to run eagerly."""
        cached = [row.cached for row in batch.rows if row.cached is not None]
        most = max(row.count for row in cached) // self.cache.page_size + 1
        rows, blocks = min(round_up(len(cached)), self.cache.max_rows), max(FIRST_WIDTH, round_up(most))
        runner = self.runner(batch.model, rows, blocks)
        if runner is None:
            return None
        cast(StaticPagedKVCache, runner.buffers.cache).set_rows(cached)
        next_tokens = runner.buffers.tokens[: len(cached)]
        next_tokens.copy_(self._last_tokens(batch.rows))
        logits = runner.run()[: len(cached)]
        self.cache.commit(cached, batch.new)
        tokens = next_tokens.clone()
        found, copied = to_host(torch.stack((logits.gather(1, tokens[:, None])[:, 0].double(), tokens.double())))
        needs_logits = not all(row.handle.is_argmax_only and not row.followers for row in batch.rows)
        step = LaunchedStep(batch.rows, logits, tokens, found, copied, needs_logits)
        for i, row in enumerate(batch.rows):
            row.launched = step, i
        return step

    def _last_tokens(self, rows: list[EngineRow]) -> Tensor:
        """The last token of each row, of the step before where that has not been read."""
        before = next((row.launched[0] for row in rows if row.launched is not None), None)
        if before is not None and before.rows == rows:
            return before.tokens
        known = [row.text[row.count] if row.launched is None else 0 for row in rows]
        places = [-1 if row.launched is None else row.launched[1] for row in rows]
        given = to_device(np.array([known, places]), self.cache.device)
        if before is None:
            return given[0]
        return torch.where(given[1] < 0, given[0], before.tokens[given[1].clamp(min=0)])


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A tensor on the host, and an event after which it is there; None where it is at once."""
    if not x.is_cuda:
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))
    return host, copied
