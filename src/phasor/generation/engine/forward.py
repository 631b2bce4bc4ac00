"""One call of the model for the rows of a batch."""

from __future__ import annotations

from torch import Tensor

from phasor.generation.engine.scheduler import EngineBatch
from phasor.generation.request import encode_sources
from phasor.generation.runners.eager import prefill
from phasor.kv_cache.paged import PagedKVCache


def run_batch(cache: PagedKVCache, batch: EngineBatch) -> Tensor:
    """Read the next tokens of a batch; the logits `[B, vocab]` after the last of each row."""
    cached = [row.cached for row in batch.rows if row.cached is not None]
    tokens = [row.text[row.count : row.count + new] for row, new in zip(batch.rows, batch.new, strict=True)]
    call = cache.call(cached, batch.new, fill=batch.fill, round_up=batch.round_up, config=batch.model.config)
    prompts = [row.handle.request.prompts[0] for row in batch.rows]
    sources = encode_sources(batch.model, prompts) if batch.reads_sources else None
    logits = prefill(batch.model, call, tokens + [[0]] * batch.fill, call.memory if sources is None else sources)
    if sources is not None:
        cache.keep_source(cached, sources, call.cross)
    return logits[: len(cached)]
