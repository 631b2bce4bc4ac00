"""The compiled step runner: every step of one token per row is the same compiled graph.

All that changes from step to step is in the tensors of a static cache. So one graph serves all steps, and all caches
of the same size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from phasor.generation.runners.eager import EagerRunner, last_logits
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.static import StaticKVCache
from phasor.transformer import Stack, Transformer


def static_step(model: Transformer, cache: StaticKVCache, tokens: Tensor) -> Tensor:
    """Feed one token per row `[B]`; the logits `[B, vocab]` after it."""
    return last_logits(model, model.decode(tokens[:, None], cache.memory, cache=cache))


@functools.cache
def compiled_step() -> Any:
    """The compiled step, created on first use: importing the compiler takes a while."""
    return torch.compile(static_step, dynamic=False)


class CompiledRunner(EagerRunner):
    """Prompts are read eagerly; from the first step on a static cache over the same memory takes over."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model, cache)
        self.static_cache: StaticKVCache | None = None

    def step(self, tokens: Sequence[int]) -> Tensor:
        if self.static_cache is None:
            self.static_cache = StaticKVCache(self.cache)
        column = torch.tensor(tokens, device=self.model.tokens.weight.device)
        return compiled_step()(self.model, self.static_cache, column)


def why_not(model: Transformer) -> str | None:
    """Why one graph does not serve all steps of a model; None where it does.

    >>> from phasor import preset
    >>> why_not(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))) is None
    True
    """
    if cast(Stack, model.decoder).needs_length:
        return "frequencies depend on the length and are computed on the host, another graph for each length"
    return None
