"""The step of one token a row as one compiled graph.

All that changes from step to step is in tensors: where the tokens stand, and which slots of the cache they take. So
one graph does for all steps, and for all caches of the same size.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.static import StaticKVCache
from phasor.transformer import Stack, Transformer

ROUND = 128  # caches are made this many tokens longer or less, so that texts of about one length share a graph


def step(model: Transformer, cache: StaticKVCache, tokens: Tensor) -> Tensor:
    """Feed one token per row `[B]`; the logits `[B, vocab]` after it."""
    hidden = model.decode(tokens[:, None], cache.memory, cache=cache)
    assert model.head is not None
    return model.head(hidden[:, -1], model.tokens.table)


@functools.cache
def compiled_step() -> Any:
    """The step as a graph, made once: asking for the compiler takes a while."""
    return torch.compile(step, dynamic=False)


class CompiledSteps:
    """Steps of a cache that has read its prompts, each by the compiled graph. The cache itself stays behind."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, StaticKVCache(cache)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a row `[B]`; the logits `[B, vocab]` after it."""
        return compiled_step()(self.model, self.cache, tokens)


def can_compile(model: Transformer) -> bool:
    """Whether one graph does for all steps: not where frequencies depend on the length, and are made on the host."""
    return not cast(Stack, model.decoder).needs_length
