"""The static cache: everything that changes from step to step is in tensors of fixed shape and address.

So one compiled graph or one CUDA graph serves all steps of one token per row, and all caches of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.slots import SlotLayout
from phasor.nn.positions.sums import Steps, Sums, running_sums
from phasor.nn.sequence import SequenceArgs, SequenceInfo
from phasor.ops import dispatch
from phasor.ops.attention import Mask
from phasor.ops.decode.reference import reorder_cache_ref


@dataclass
class StaticLayerStep:
    """One layer in one step: it attends to all of its slots, and the mask hides the empty ones."""

    mask: Mask
    key_positions: Tensor
    slot: Tensor  # [B], of each row's new token
    keys: Tensor
    values: Tensor
    sums: Tensor | None = None
    sums_before: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return write_slot(self.keys, self.slot, k).to(k.dtype), write_slot(self.values, self.slot, v).to(v.dtype)

    def sum_steps(self, steps: Steps) -> tuple[Sums, Sums]:
        assert self.sums is not None
        sums = running_sums(steps, self.sums_before).fixed
        return Sums(sums), Sums(write_slot(self.sums, self.slot, sums))


def write_slot(data: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """Write every row's new entry `[B, 1, ...]` into its slot."""
    data[torch.arange(len(slot), device=slot.device), slot] = new[:, 0].to(data.dtype)
    return data


class StaticKVCache:
    """The keys and values of a dynamic cache, in the same memory, for steps of one token per row.

    `counts` `[B]` are the tokens held, `next_positions` `[B, 1]` the positions of the next ones, `origins` `[B, 1]`
    those of the first ones. The dynamic cache itself is not updated. With `source_length`, an encoder-decoder's cache
    has room for sources of up to so many tokens, which `continue_from` fills; without, it has the source of the dynamic
    cache. `length` is the one that frequencies are planned for, where they depend on it.

    >>> from phasor import Transformer, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens, cache = torch.randint(0, 50, (1, 9)), model.new_cache(1, 16)
    >>> with torch.no_grad():
    ...     pieces = [model(tokens[:, :8], cache=cache), model(tokens[:, 8:], cache=StaticKVCache(cache))]
    ...     torch.allclose(torch.cat(pieces, dim=1), model(tokens), atol=1e-5)
    True
    """

    def __init__(self, cache: KVCache, *, source_length: int | None = None, length: int | None = None) -> None:
        if cache.needs_length and length is None:
            if len(set(cache.lengths)) > 1:
                raise ValueError("a static cache takes one length for all rows where frequencies depend on it")
            length = cache.lengths[0]
        data = cache.keys[0].data
        row = torch.zeros(cache.batch_size, dtype=torch.int64, device=data.device)
        self.config, self.layouts, self.length = cache.config, cache.layouts, length
        self.keys = [layer.data for layer in cache.keys]
        self.values = [layer.data for layer in cache.values]
        self.sums = [None if layer is None else layer.data for layer in cache.sums]
        self.positions = {layout: table.data for layout, table in cache.positions.items()}
        self.counts, self.next_positions, self.origins = row, row.clone()[:, None], row.clone()[:, None]
        self.memory, self.cross_kv = cache.memory, cache.cross_kv
        if source_length is not None:
            shape = cache.batch_size, source_length, *data.shape[2:]
            self.cross_kv = [(data.new_zeros(shape), data.new_zeros(shape)) for _ in self.keys]
            real = torch.ones(shape[:2], dtype=torch.bool, device=data.device)
            self.memory = EncoderOutput(data.new_zeros(cache.batch_size, 0, self.config.dim), real)
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
            self._copy_source(cache.memory, cache.cross_kv)

    def _copy_source(self, memory: EncoderOutput, cross_kv: list[tuple[Tensor, Tensor]]) -> None:
        """Fill the room for a source; what is left of it is padding."""
        assert self.memory is not None
        assert self.memory.attention_mask is not None
        size, real = memory.hidden.shape[1], self.memory.attention_mask
        real.zero_()
        real[:, :size] = True if memory.attention_mask is None else memory.attention_mask
        for own, given in zip(self.cross_kv, cross_kv, strict=True):
            for room, x in zip(own, given, strict=True):
                room[:, :size].copy_(x)

    def reorder(self, order: Tensor, beams: int) -> None:
        """Let row `i` continue from what row `order[i]` holds, one of the same `beams` neighbors; in place.

        Such rows hold as many tokens as each other, at the same positions, after the same source.
        """
        if dispatch.triton_why_not(self.keys[0]) is None:
            from phasor.ops.decode.reorder_cache import reorder_cache
        else:
            reorder_cache = reorder_cache_ref
        for keys, values in zip(self.keys, self.values, strict=True):
            reorder_cache(keys, values, order, self.counts, beams)
        for sums in self.sums:
            if sums is not None:
                sums.copy_(sums[order])

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
            causal = Mask(causal=True, query_index=self.counts[:, None], key_index=held)
            per_layout[layout] = causal, write_slot(table, slot, seq.rows.expand(len(slot), 1)), slot
        return [
            StaticLayerStep(*per_layout[layout], keys, values, sums, self._sums_before(layout, sums))
            for layout, keys, values, sums in zip(self.layouts, self.keys, self.values, self.sums, strict=True)
        ]

    def _sums_before(self, layout: SlotLayout, sums: Tensor | None) -> Tensor | None:
        """The running sums up to each row's last token, `[B, sums]`; zeros for rows that hold none."""
        if sums is None:
            return None
        slots = layout.slots_of((self.counts - 1).clamp(min=0))
        last = sums[torch.arange(len(slots), device=slots.device), slots]
        return torch.where(self.counts[:, None] > 0, last, 0)

    def commit(self) -> None:
        self.counts.add_(1)
        self.next_positions.add_(1)
