"""The step of one token a row as one compiled graph.

All that changes from step to step is in tensors: where the tokens stand, and which slots of the cache they take. So
one graph does for all steps, and for all caches of the same size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from phasor.kv_cache.dynamic import KVCache, Memory
from phasor.kv_cache.slots import Layout
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention.mask import Mask
from phasor.transformer import Stack, Transformer

ROUND = 128  # caches are made this many tokens longer or less, so that texts of about one length share a graph


@dataclass
class Slots:
    """What one layer sees in a step, all of its slots: those without a token are hidden by the mask."""

    mask: Mask
    key_positions: Tensor
    slot: Tensor  # of each row's new token
    keys: Tensor
    values: Tensor

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return put(self.keys, self.slot, k).to(k.dtype), put(self.values, self.slot, v).to(v.dtype)


def put(data: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """Write every row's new entry `[B, 1, ...]` into its slot."""
    data[torch.arange(len(slot), device=slot.device), slot] = new[:, 0].to(data.dtype)
    return data


@dataclass
class State:
    """A cache as tensors: what it holds, how many tokens in each row, and where the next ones stand."""

    layouts: list[Layout]
    keys: list[Tensor]
    values: list[Tensor]
    positions: dict[Layout, Tensor]
    counts: Tensor  # [B]
    next_positions: Tensor  # [B, 1]
    origins: Tensor  # [B, 1]
    memory: Memory | None
    cross: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: KVCache) -> Self:
        """The state of a cache, over the same memory."""
        row = torch.zeros(cache.batch_size, dtype=torch.int64, device=cache.keys[0].data.device)
        state = cls(
            layouts=cache.layouts,
            keys=[store.data for store in cache.keys],
            values=[store.data for store in cache.values],
            positions={layout: store.data for layout, store in cache.positions.items()},
            counts=row,
            next_positions=row.clone()[:, None],
            origins=row.clone()[:, None],
            memory=cache.memory,
            cross=cache.cross,
        )
        state.follow(cache)
        return state

    def follow(self, cache: KVCache) -> None:
        """Go on from where a cache over the same memory is."""
        self.counts.copy_(torch.tensor(cache.counts))
        following = torch.as_tensor(cache.next_positions, device=self.counts.device)
        self.next_positions.copy_(following.expand(cache.batch_size)[:, None])
        if cache.origins is not None:
            self.origins.copy_(cache.origins)

    def begin(self, at: SequenceInfo, rule: Mask, needs_length: bool) -> list[Slots]:
        """What each layer sees in this step."""
        shared: dict[Layout, tuple[Mask, Tensor, Tensor]] = {}
        for layout, table in self.positions.items():
            ring = layout.sinks + (self.counts - layout.sinks) % layout.ring
            slot = torch.where(self.counts < layout.sinks, self.counts, ring)
            held = None if layout.window is None else layout.held(self.counts + 1, layout.slots)
            mask = Mask(causal=True, query_at=self.counts[:, None], key_at=held)
            shared[layout] = mask, put(table, slot, at.rows.expand(len(slot), 1)), slot
        return [
            Slots(*shared[layout], keys, values)
            for layout, keys, values in zip(self.layouts, self.keys, self.values, strict=True)
        ]

    def finish(self) -> None:
        """Whoever steps counts."""


def step(model: Transformer, state: State, tokens: Tensor) -> Tensor:
    """Feed one token a row `[B]`; the logits `[B, vocab]` after it."""
    at = SequenceInfo(state.next_positions, None, first=state.origins)
    stack = cast(Stack, model.decoder)
    hidden = stack(model.tokens(tokens[:, None]), at, memory=state.memory, cache=cast(KVCache, state))
    assert model.head is not None
    return model.head(hidden[:, -1], model.tokens.table)


@functools.cache
def compiled_step() -> Any:
    """The step as a graph, made once: asking for the compiler takes a while."""
    return torch.compile(step, dynamic=False)


class CompiledSteps:
    """Steps of a cache that has read its prompts, each by the compiled graph. The cache itself stays behind."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.state = model, State.of(cache)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a row `[B]`; the logits `[B, vocab]` after it."""
        logits = compiled_step()(self.model, self.state, tokens)
        self.state.counts += 1
        self.state.next_positions += 1
        return logits


def can_compile(model: Transformer) -> bool:
    """Whether one graph does for all steps: not where frequencies depend on the length, and are made on the host."""
    return not cast(Stack, model.decoder).needs_length
