"""The static cache: everything that changes from step to step is in tensors of fixed shape and address.

So one compiled graph or one CUDA graph serves all steps of one token per row, and all caches of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.slots import SlotLayout
from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import SequenceArgs, SequenceInfo
from phasor.ops import dispatch
from phasor.ops.attention import Mask
from phasor.ops.decode.reference import reorder_cache_ref


@dataclass(slots=True, eq=False)
class StaticLayerStep(LayerStep):
    """One layer in one step: it attends to all of its slots, and the mask hides the empty ones."""

    layout: SlotLayout
    counts: Tensor  # [B], the tokens held before this one
    slot: Tensor  # [B], of each row's new token
    tensors: dict[str, Tensor]

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        return tuple(write_slot(self.tensors[name], self.slot, x).to(x.dtype) for name, x in new.items())

    def last(self, name: str) -> Tensor:
        data = self.tensors[name]
        slots = self.layout.slots_of((self.counts - 1).clamp(min=0))
        entries = data[torch.arange(len(slots), device=slots.device), slots]
        return torch.where((self.counts > 0).view(-1, *[1] * (entries.dim() - 1)), entries, 0)


def write_slot(data: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """Write every row's new entry `[B, 1, ...]` into its slot."""
    data[torch.arange(len(slot), device=slot.device), slot] = new[:, 0].to(data.dtype)
    return data


class StaticKVCache:
    """What a dynamic cache keeps, in the same memory, for steps of one token per row.

    `counts` `[B]` are the tokens held, `next_positions` `[B, 1]` the positions of the next ones, `origins` `[B, 1]`
    those of the first ones. The dynamic cache itself is not updated. With `source_length`, an encoder-decoder's cache
    has memory for sources of up to that many tokens, which `continue_from` fills; without, it has the source of the
    dynamic cache. `length` is the one that frequencies are planned for, where they depend on it.

    >>> from phasor import Transformer, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens, cache = torch.randint(0, 50, (1, 9)), model.new_cache(1, 16)
    >>> with torch.no_grad():
    ...     pieces = [model(tokens[:, :8], cache=cache), model(tokens[:, 8:], cache=StaticKVCache(cache))]
    ...     torch.allclose(torch.cat(pieces, dim=1), model(tokens), atol=1e-5)
    True
    """

    state_slots: Tensor | None = None  # each row's own states

    def __init__(self, cache: KVCache, *, source_length: int | None = None, length: int | None = None) -> None:
        if cache.needs_length and length is None:
            if len(set(cache.lengths)) > 1:
                raise ValueError("a static cache takes one length for all rows where frequencies depend on it")
            length = cache.lengths[0]
        row = torch.zeros(cache.batch_size, dtype=torch.int64, device=cache.device)
        self.config, self.layouts, self.length = cache.config, cache.layouts, length
        self.layers, self.states, self.positions = cache.layers, cache.states, cache.positions
        self.counts, self.next_positions, self.origins = row, row.clone()[:, None], row.clone()[:, None]
        self.memory, self.cross = cache.memory, cache.cross
        if source_length is not None:
            self.cross = cache.new_cross(source_length)
            real = torch.ones(cache.batch_size, source_length, dtype=torch.bool, device=cache.device)
            shape = cache.batch_size, 0, self.config.for_side("encoder").dim
            self.memory = EncoderOutput(torch.zeros(shape, dtype=cache.dtype, device=cache.device), real)
        self.continue_from(cache)

    def continue_from(self, cache: KVCache) -> None:
        """Take over the counts, positions and source of a cache over the same memory."""
        self.counts.copy_(torch.tensor(cache.counts))
        next_positions = torch.as_tensor(cache.next_positions, device=self.counts.device)
        self.next_positions.copy_(next_positions.expand(cache.batch_size)[:, None])
        origins = self.next_positions if cache.origins is None else cache.origins
        holds = self.counts[:, None] > 0  # the next token of an empty row is its first
        self.origins.copy_(torch.where(holds, origins, self.next_positions))
        if cache.memory is not None and cache.memory is not self.memory:
            self._copy_source(cache.memory, cache.cross)

    def _copy_source(self, memory: EncoderOutput, cross: list[dict[str, Tensor]]) -> None:
        """Copy a source into the memory reserved for it; the rest is padding."""
        assert self.memory is not None
        assert self.memory.attention_mask is not None
        size, real = memory.hidden.shape[1], self.memory.attention_mask
        real.zero_()
        real[:, :size] = True if memory.attention_mask is None else memory.attention_mask
        for own, given in zip(self.cross, cross, strict=True):
            for name, x in given.items():
                own[name][:, :size].copy_(x)

    def reorder(self, order: Tensor, beams: int) -> None:
        """Let row `i` continue from what row `order[i]` holds, one of the same `beams` neighbors; in place.

        Such rows hold as many tokens as each other, at the same positions, after the same source.
        """
        if dispatch.triton_why_not(self.counts) is None:
            from phasor.ops.decode.reorder_cache import reorder_cache
        else:
            reorder_cache = reorder_cache_ref
        for tensors in filter(None, self.layers):
            reorder_cache(tuple(tensors.values()), order, self.counts, beams)
        reorder_cache_ref([x for states in self.states for x in states.values()], order, self.counts, beams)

    def kernel_args(self, index: int) -> dict[str, Any]:
        """Where the decode kernels find what a layer keeps."""
        return {"sink_tokens": self.layouts[index].sinks}

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """One token per row, right after those held."""
        if tokens.shape != self.next_positions.shape:
            rows = len(self.next_positions)
            raise ValueError(f"a static cache of {rows} rows takes tokens [{rows}, 1], not {list(tokens.shape)}")
        for name, value in args.items():
            if value is not None:
                raise ValueError(f"a static cache takes no {name}: its tokens follow those it holds")
        return SequenceInfo(self.next_positions, self.length, first=self.origins)

    def begin(self, seq: SequenceInfo, mask: Mask) -> list[StaticLayerStep]:
        if mask.prefix_length is not None:
            raise ValueError("a static cache takes no prefix_length: a prefix belongs to the first call")
        per_layout: dict[SlotLayout, tuple[Mask, Tensor, Tensor]] = {}
        for layout, table in self.positions.items():
            slot = layout.slots_of(self.counts)
            held = None if layout.window is None else layout.token_index(self.counts + 1, layout.slots)
            causal = Mask(causal=True)
            if not layout.state:
                causal = replace(causal, query_index=self.counts[:, None], key_index=held)
            per_layout[layout] = causal, write_slot(table, slot, seq.rows.expand(len(slot), 1)), slot
        steps = []
        for layout, tensors, states in zip(self.layouts, self.layers, self.states, strict=True):
            mask, key_positions, slot = per_layout[layout]
            steps.append(StaticLayerStep(mask, key_positions, layout, self.counts, slot, tensors, states=states))
        return steps

    def commit(self) -> None:
        self.counts.add_(1)
        self.next_positions.add_(1)
