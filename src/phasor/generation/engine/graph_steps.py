"""Decoding steps of the engine as CUDA graphs, each for one number of rows.

A step reads the tokens of the step before on the device, so that it is launched before the host has read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
from phasor.kv_cache.static_paged import StaticPagedKVCache, new_choices
from phasor.transformer import Transformer

ROW_STEP = 32  # rows: matrix products of many rows take time by their number


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that computes the next token of rows, or the call that ends their prompts.

    `logits` `[B, vocab]` hold until the next step, and `chosen` has the likeliest tokens and their logits from the
    entry `first` on, on the host once `copied`.
    """

    rows: list[EngineRow]
    logits: Tensor
    chosen: Tensor
    copied: torch.cuda.Event | None
    needs_logits: bool = False  # the next token of some row is not just the likeliest, or begins several rows
    first: int = 0

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            row.launched = self, self.first + i

    def read(self) -> list[tuple[int, float]]:
        """Wait for the likeliest tokens and their logits."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, best = self.chosen[:, self.first : self.first + len(self.rows)]
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
    """The graphs of the models of an engine: numbers of rows and of pages are rounded up, so that there are few."""

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
        graphs = self._of(model)
        if graphs is None:
            return None
        if (rows, blocks) not in graphs.runners:
            chosen = graphs.chosen.clone()
            pages = StaticPagedKVCache(self.cache, rows, blocks, graphs.chosen, model.config)
            graphs.runners[rows, blocks] = self._capture(StepSpec(model, rows, pages=pages))
            graphs.chosen.copy_(chosen)  # a step is run before it is captured, and chooses something
        return graphs.runners[rows, blocks]

    def _of(self, model: Transformer) -> ModelGraphs | None:
        """The graphs of a model; None where its steps run eagerly at every size."""
        if model not in self.graphs:
            captured = runs_cuda_graph(StepSpec(model, 1, pages=StaticPagedKVCache(self.cache, 1, 1)))
            self.graphs[model] = ModelGraphs(model, self.cache.max_rows) if captured else None
        return self.graphs[model]

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
        rows, blocks = min(round_up_rows(len(cached)), self.cache.max_rows), max(FIRST_WIDTH, round_up(most))
        runner = self.runner(batch.model, rows, blocks)
        if runner is None:
            return None
        pages = cast(StaticPagedKVCache, runner.buffers.cache)
        known = [row.text[row.count] if row.launched is None else -1 - row.launched[1] for row in batch.rows]
        pages.set_rows(cached, known)
        logits = runner.run()[: len(cached)]
        self.cache.commit(cached, batch.new)
        chosen, copied = to_host(pages.chosen)
        needs_logits = not all(map(is_plain, batch.rows))
        return LaunchedStep(batch.rows, logits, chosen, copied, needs_logits)

    def choose(self, rows: Sequence[EngineRow], logits: Tensor, first: int) -> LaunchedStep | None:
        """Let the next step take the likeliest tokens after the prompts that end, before the host has read them.

        `first` of others are taken so already. None where the host has to choose, or steps run eagerly.
        """
        graphs, places = self._of(rows[0].handle.request.model), [i for i, row in enumerate(rows) if row.pending == 0]
        ended = [rows[i] for i in places]
        if graphs is None or not all(map(is_plain, ended)):
            return None
        if len(ended) < len(rows):
            logits = logits.index_select(0, to_device(np.array(places, dtype=np.int64), logits.device))
        own = slice(self.cache.max_rows + first, self.cache.max_rows + first + len(ended))
        tokens = logits.argmax(-1)
        graphs.chosen.view(torch.int64)[0, own] = tokens
        graphs.chosen[1, own] = logits.gather(1, tokens[:, None])[:, 0]
        return LaunchedStep(ended, logits, *to_host(graphs.chosen), first=own.start)


def round_up_rows(count: int) -> int:
    """A power of two, or a multiple of `ROW_STEP`.

    >>> [round_up_rows(count) for count in (1, 3, 33, 65, 129)]
    [1, 4, 64, 96, 160]
    """
    return round_up(count) if count <= 2 * ROW_STEP else -(-count // ROW_STEP) * ROW_STEP


def is_plain(row: EngineRow) -> bool:
    """Whether the next token of a row is the likeliest one, and no other row begins with it."""
    return row.handle.is_argmax_only and not row.followers


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a tensor on the host, and an event after which it is there; None where it is at once."""
    if not x.is_cuda:
        return x.clone(), None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))
    return host, copied
