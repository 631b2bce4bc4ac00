"""The dynamic key/value cache: what layers keep for the tokens a decoder has read, for calls of any number of tokens.

Every layer keeps the tensors that it declares by `cached_per_token`, its keys and values among them, in slots. The
first `sinks` tokens of a row have fixed slots, the others go into a ring buffer; a layer without a window has a ring as
long as the cache, which never wraps around. Rows may hold different numbers of tokens. Keys are stored with their
positions applied, which is final because the sequence's planned length is fixed when the cache is created. A layer
whose attention keeps a state declares it by `cached_per_sequence`, and has one for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from phasor.config import AttentionConfig, ModelConfig
from phasor.config.cached import CachedTensor
from phasor.config.schema import check_integer, quote
from phasor.config.text_files import path_of
from phasor.kv_cache.cache_file import read_cache, write_cache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.slots import EMPTY, RingWrite, SlotLayout, last_entries
from phasor.kv_cache.states import States, begins_document, clear_rows, restore_states, stored_dtype
from phasor.nn.checks import check_attention_mask
from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import SequenceArgs, SequenceInfo, token_order
from phasor.ops.attention import Mask


@dataclass(slots=True, eq=False)
class DynamicLayerStep(LayerStep):
    """One layer in one call: what it keeps, and the write of the new tokens."""

    write: RingWrite
    tensors: dict[str, Tensor]

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.write.update(self.tensors[name], x) for name, x in new.items())

    def last(self, name: str) -> Tensor:
        return self.write.last(self.tensors[name])

    def sum_from_keys(self, x: Tensor, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor:
        if not mask.aligned:  # the slots hold exactly the tokens that the query attends to, in the order of a ring
            after = torch.tensor(self.write.after, device=x.device)
            mask = replace(mask, key_index=self.write.layout.token_index(after, self.write.used_after))
        return LayerStep.sum_from_keys(self, x, queries, keys, mask)


class KVCache:
    """Keys and values of a decoder, created by `model.new_cache(batch_size, max_length)`.

    `layers` has what each layer keeps, tensors `[B, slots, ...]` by name, such as `layers[0]["keys"]`, and `states`
    what it keeps of each row of any length, tensors `[B, ...]`. `length` is the sequence length that frequencies
    are planned for (an integer or one per row), `used` the number of tokens held (an integer, or one per row where they
    differ). A call with a cache equals the full forward over all tokens so far at that length. No gradient flows
    through a cache.

    >>> from phasor import Transformer, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens, cache = torch.randint(0, 50, (1, 9)), model.new_cache(1, 16)
    >>> pieces = [model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)]
    >>> cache.used, torch.allclose(torch.cat(pieces, dim=1), model(tokens, length=16), atol=1e-5)
    (9, True)
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        *,
        length: int | Sequence[int] | None = None,
        spare: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("max_length", max_length, 1), ("spare", spare, 0)):
            most = (1 << 31) if name == "batch_size" else (1 << 63)
            check_integer(f"a cache's {name}", value, least, most)
        self.config, self.batch_size, self.max_length, self.spare = config, batch_size, max_length, spare
        self.lengths = per_row_lengths(max_length if length is None else length, batch_size)
        self.counts = [0] * batch_size
        self.peaks = [0] * batch_size  # the most tokens each row ever held
        self.prefixes = [0] * batch_size  # the tokens at the start of each row that saw each other in the first call
        self.next_positions: int | Tensor = 0  # one per row where it is not the number of tokens
        self.origins: Tensor | None = None  # the first position of each row's document
        self.broken = False  # whether a call has begun and not been committed
        self.memory: EncoderOutput | None = None
        self.cross: list[dict[str, Tensor]] = []  # what layers computed from the encoder's output, by name
        layers = [config.layer(index) for index in range(config.num_layers)]
        schemes = (config.input_position, *(layer.position for layer in layers))
        self.needs_length = any(scheme.depends_on_length for scheme in schemes)
        self.windowed = any(layer.attention.window or layer.attention.sparse for layer in layers)
        self.layouts = [self._layout(layer.attention) for layer in layers]
        self.positions = {
            layout: torch.zeros(batch_size, layout.slots, dtype=torch.int64, device=device) for layout in self.layouts
        }
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.declared = [config.cached_per_token(index) for index in range(config.num_layers)]
        self.layers = [self._zeros(kept, x.slots) for kept, x in zip(self.declared, self.layouts, strict=True)]
        self.states = [self._zeros(config.cached_per_sequence(index)) for index in range(config.num_layers)]
        self.document_ids: dict[SlotLayout, Tensor] | None = None

    def _layout(self, attention: AttentionConfig) -> SlotLayout:
        if attention.keeps_state:
            return SlotLayout(0, 1 + self.spare, 1, state=True)
        window, sinks, sparse = attention.reach, attention.sink_tokens, attention.sparse is not None
        if window is None or self.max_length < window:
            return SlotLayout(0, self.max_length, None, sparse=sparse)
        return SlotLayout(sinks, window + self.spare, window, attention.cap_sinks, sparse)

    def new_table(self) -> dict[SlotLayout, Tensor]:
        """An integer for every slot of every layout."""
        return {layout: torch.zeros_like(positions) for layout, positions in self.positions.items()}

    def new_cross(self, source_length: int) -> list[dict[str, Tensor]]:
        """Room for what the cross-attention of each layer keeps of sources of some length."""
        layers = (self.config.layer(index) for index in range(self.config.num_layers))
        return [self._zeros(layer.attention.cached_per_token(self.config), source_length) for layer in layers]

    def _zeros(self, declared: dict[str, CachedTensor], *tokens: int) -> dict[str, Tensor]:
        """What a layer keeps for some number of tokens in each row, or for each row."""
        return {
            name: torch.zeros(
                (self.batch_size, *tokens, *kept.shape), device=self.device, dtype=stored_dtype(kept, self.dtype)
            )
            for name, kept in declared.items()
        }

    @property
    def device(self) -> torch.device:
        return next(iter(self.positions.values())).device

    @property
    def length(self) -> int | list[int]:
        """The length planned for; a list where rows differ."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else list(self.lengths)

    @property
    def used(self) -> int | list[int]:
        """The number of tokens held; a list where rows differ."""
        return self.counts[0] if self.uniform else list(self.counts)

    @property
    def uniform(self) -> bool:
        """Whether all rows hold the same number of tokens."""
        return len(set(self.counts)) == 1

    @property
    def endless(self) -> bool:
        """Whether every layer has a window or a state, so that tokens may go on past `max_length`."""
        return all(layout.window is not None for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of what layers keep, that of an encoder's output included."""
        return sum(x.nbytes for tensors in (*self.layers, *self.states, *self.cross) for x in tensors.values())

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """Positions and lengths of the next tokens; by default they follow those held."""
        rows, count = tokens.shape
        if self.broken:
            raise ValueError("the last call with this cache failed half-way: continue with a copy made before it")
        if rows != self.batch_size:
            raise ValueError(f"the cache has {self.batch_size} rows, and the tokens have {rows}")
        if args.get("length") is not None:
            raise ValueError("a cache is given its length when it is created: new_cache(..., length=...)")
        document_ids, attention_mask = args.get("document_ids"), args.get("attention_mask")
        check_attention_mask(attention_mask, tokens, self.windowed, has_cache=True)
        held = max(self.counts) > 0
        if held and document_ids is not None and self.document_ids is None:
            raise ValueError("document_ids must be given from a cache's first call on")
        last = self._last(self.document_ids) if held and self.document_ids is not None else None
        if document_ids is None and last is not None:
            document_ids = last[:, None].expand(rows, count)
        order = token_order(attention_mask, document_ids)
        same = None if last is None or document_ids is None else document_ids == last[:, None]
        positions = args.get("positions")
        self._counting = positions is None
        if positions is None:
            positions = self._next(count, order, same, tokens.device)
        length: int | Tensor = self.lengths[0]
        if len(set(self.lengths)) > 1:
            length = torch.tensor(self.lengths, device="cpu")[:, None].expand(rows, count)
        first = self.origins if held else None
        seq = SequenceInfo(
            positions, length if self.needs_length else count, attention_mask, document_ids, order, first
        )
        if first is not None and (same is not None or min(self.counts) == 0):
            goes_on = torch.tensor(self.counts, device=first.device)[:, None] > 0
            goes_on = goes_on if same is None else goes_on & same
            seq = replace(seq, first=torch.where(goes_on, first, replace(seq, first=None).origin()))
        return seq

    def _next(self, count: int, order: Tensor | None, same: Tensor | None, device: torch.device) -> Tensor:
        """Default positions of the next tokens, `[T]` or `[B, T]`."""
        start = self.next_positions
        new = torch.arange(count, device=device) if order is None else order
        if same is not None:
            start = torch.where(same, torch.as_tensor(start, device=device).expand(self.batch_size)[:, None], 0)
            return new + start
        return new + start if isinstance(start, int) else new + start[:, None]

    def begin(self, seq: SequenceInfo, mask: Mask) -> list[DynamicLayerStep]:
        """Start a call: a step per layer. `mask` is the mask among the tokens of the call itself."""
        count = seq.rows.shape[-1]
        real = None if seq.attention_mask is None else [row.nonzero()[:, 0] for row in seq.attention_mask]
        new = [count if real is None else len(real[row]) for row in range(self.batch_size)]
        after = [n + m for n, m in zip(self.counts, new, strict=True)]
        self._check(seq, after)
        prefixes = self.prefixes if mask.prefix_length is None else mask.prefix_length.tolist()
        if mask.prefix_length is not None:
            self._check_prefixes(prefixes, seq, after)
        if seq.document_ids is not None and self.document_ids is None:
            self.document_ids = self.new_table()
        rows = self._rows_to_store(seq).expand(self.batch_size, count)
        self.broken = True
        if seq.document_ids is not None and any(self.states):
            assert self.document_ids is not None
            last = self._last(self.document_ids)
            clear_rows(self.states, begins_document(seq.document_ids, seq.attention_mask, last))
        per_layout: dict[SlotLayout, tuple[Mask, Tensor, RingWrite]] = {}
        for layout in self.positions:
            write = RingWrite(layout, self.counts, after, real, count, rows.device)
            document_ids = None
            if self.document_ids is not None:
                assert seq.document_ids is not None
                document_ids = write.update(self.document_ids[layout], seq.document_ids.expand(self.batch_size, count))
            positions = write.update(self.positions[layout], rows)
            per_layout[layout] = self._mask(write, seq, mask, document_ids), positions, write
        self._pending = seq, after, prefixes
        return [
            DynamicLayerStep(*per_layout[layout], tensors, states=states)
            for layout, tensors, states in zip(self.layouts, self.layers, self.states, strict=True)
        ]

    def _mask(self, write: RingWrite, seq: SequenceInfo, mask: Mask, document_ids: Tensor | None) -> Mask:
        """Which keys each query attends to: `mask` in a first call, later by the token index of queries and keys."""
        if write.mode == "first" or write.layout.state:
            return mask
        layout, device, real = write.layout, seq.positions.device, seq.attention_mask
        causal = Mask(causal=True, query_document_ids=seq.document_ids, key_document_ids=document_ids)
        if write.uniform and layout.window is None:
            return replace(causal, offset=write.before[0])
        if write.uniform and write.mode == "concat":
            first_key = write.before[0] - write.num_old  # the keys are in order, without those out of reach
            return replace(causal, offset=write.num_old, first_key=first_key)
        plain = self.spare == 0 and not layout.cap_sinks and not layout.sparse
        if write.slot is not None and document_ids is None and plain:
            return Mask(aligned=False)  # the slots hold exactly the tokens that the query attends to
        new = torch.arange(seq.rows.shape[-1], device=device)[None] if real is None else real.cumsum(-1) - 1
        before = torch.tensor(write.before, device=device)
        query_index = before[:, None] + new.clamp(min=0)
        if write.mode == "concat":
            own = query_index if real is None else torch.where(real, query_index, EMPTY)
            key_index = torch.cat((layout.token_index(before, write.used_before), own), dim=-1)
            return replace(causal, query_index=query_index, key_index=key_index)
        if layout.window is not None:
            after = torch.tensor(write.after, device=device)
            causal = replace(causal, key_index=layout.token_index(after, write.used_after))
        return replace(causal, query_index=query_index)

    def _check(self, seq: SequenceInfo, after: list[int]) -> None:
        if max(after) > self.max_length and not self.endless:
            raise ValueError(f"the cache holds at most {self.max_length} tokens, and this call makes it {max(after)}")
        if self.needs_length:
            for row, (total, planned) in enumerate(zip(after, self.lengths, strict=True)):
                if total > planned:
                    raise ValueError(
                        f"row {row} comes to {total} tokens, past the length {planned} the cache plans for"
                    )
        if seq.document_ids is not None and any(x.sinks for x in self.layouts):
            raise ValueError(
                "a cache keeps the sink tokens of a row, not of each of its documents: leave document_ids out"
            )
        if seq.document_ids is not None and any(x.sparse for x in self.layouts):
            raise ValueError(
                "a cache counts the tokens of sparse attention from the start of a row, not of each of its documents: "
                "leave document_ids out"
            )

    def _check_prefixes(self, prefixes: list[int], seq: SequenceInfo, after: list[int]) -> None:
        """Whether later calls, which are not given the prefix, still see all of it."""
        if max(self.counts) > 0:
            raise ValueError("with a cache prefix_length belongs to the first call")
        if not any(prefixes):
            return
        if self.windowed:
            raise ValueError("with a cache prefix_length is for models without a sliding window, which would hide it")
        if seq.document_ids is not None:
            raise ValueError("with a cache prefix_length is for rows of one document: leave document_ids out")
        for row, (prefix, held) in enumerate(zip(prefixes, after, strict=True)):
            if prefix > held:
                raise ValueError(
                    f"row {row} has {held} real tokens in the cache's first call, and its prefix_length is {prefix}: "
                    "the first call must hold the whole prefix"
                )

    def _rows_to_store(self, seq: SequenceInfo) -> Tensor:
        """Positions to store, `[B or 1, T]`; of several axes the largest so far, after which text continues."""
        if seq.positions.dim() < 3:
            return seq.rows
        furthest = seq.positions.amax(0).cummax(-1).values
        start = self.next_positions
        return furthest.clamp(min=start - 1) if isinstance(start, int) else furthest.maximum(start[:, None] - 1)

    def commit(self) -> None:
        """Count the tokens of the call that `begin` started."""
        seq, after, self.prefixes = self._pending
        self.broken = False
        if self.origins is None or seq.document_ids is not None or min(self.counts) == 0:
            self.origins = self._origins(seq)
        added = [n - m for n, m in zip(after, self.counts, strict=True)]
        self.counts = after
        self.peaks = [max(p, n) for p, n in zip(self.peaks, after, strict=True)]
        if self._counting and seq.document_ids is None:
            same = len(set(added)) == 1
            self.next_positions += added[0] if same else torch.tensor(added, device=seq.positions.device)
        else:
            self.next_positions = self._positions_after_last()

    def _origins(self, seq: SequenceInfo) -> Tensor:
        """For each row the first position of the document that its last real token belongs to, `[B, 1]`."""
        count = seq.rows.shape[-1]
        origins = seq.origin().expand(self.batch_size, count)
        if seq.attention_mask is None:
            return origins[:, -1:].clone()
        index = torch.arange(count, device=origins.device)
        last = torch.where(seq.attention_mask, index, 0).amax(-1, keepdim=True)
        own = origins.gather(1, last)
        return own if self.origins is None else torch.where(seq.attention_mask.any(-1, True), own, self.origins)

    def _positions_after_last(self) -> Tensor:
        """The position after each row's last token, `[B]`; zero for rows that hold none."""
        last = self._last(self.positions)
        return last + (torch.tensor(self.counts, device=last.device) > 0).to(last.dtype)

    def _last(self, table: dict[SlotLayout, Tensor]) -> Tensor:
        """The entry of each row's last token, `[B]`; zero for rows that hold none."""
        layout, data = next(iter(table.items()))
        return last_entries(data, layout, self.counts)

    def crop(self, tokens: int | Sequence[int], states: States | None = None) -> None:
        """Undo the last tokens: an integer, or one per row.

        A ring overwrites its oldest tokens, so after it has wrapped around at most `spare` tokens (plus one) can be
        undone. A state cannot be undone token by token: where layers keep one, crop takes all tokens of a row or none,
        or the `states` that rows had before those tokens.
        """
        undo = per_row_integers(tokens, self.batch_size, "crop takes")
        after = [n - u for n, u in zip(self.counts, undo, strict=True)]
        for row, (u, n) in enumerate(zip(undo, after, strict=True)):
            if u < 0 or n < 0:
                raise ValueError(f"crop undoes 0 to {self.counts[row]} tokens in row {row}, not {u}")
            if u and 0 < n < self.prefixes[row]:
                raise ValueError(
                    f"the {self.prefixes[row]} tokens of the prefix in row {row} have seen each other: "
                    f"{self.counts[row] - self.prefixes[row]} tokens can be undone, or all of them, not {u}"
                )
            if u and n and states is None and any(self.states):
                raise ValueError(
                    f"the state that layers keep of row {row} cannot be undone token by token: crop takes 0 or all "
                    f"{self.counts[row]} tokens, not {u}"
                )
            for layout in self.layouts:
                if layout.window is None or self.peaks[row] <= layout.slots or (layout.state and n == 0):
                    continue
                kept = self.peaks[row] - self.spare - min(1, layout.window - 1)  # a window of 1 keeps no older token
                if n < kept:
                    raise ValueError(
                        f"the window's ring buffer has wrapped around: in row {row} at most "
                        f"{self.counts[row] - kept} tokens can be undone, not {u}; "
                        "create the cache with more spare"
                    )
        self.counts = after
        if not any(undo):
            return
        if states is not None:
            restore_states(self.states, states)
        if any(self.states) and not all(after):
            clear_rows(self.states, torch.tensor([n == 0 for n in after], device=self.device))
        self.prefixes = [min(p, n) for p, n in zip(self.prefixes, after, strict=True)]
        if isinstance(self.next_positions, int) and self.uniform:
            self.next_positions -= undo[0]
        else:
            self.next_positions = self._positions_after_last()
        if max(after) == 0:
            self.next_positions, self.origins, self.document_ids = 0, None, None

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Let row `i` continue from what row `rows[i]` holds, as a beam search does at every step.

        Rows that are not listed are dropped, and with fewer entries than rows the cache becomes smaller.
        """
        given = rows.tolist() if isinstance(rows, Tensor) else rows
        count = min(len(given), self.batch_size) if isinstance(given, list | tuple) else self.batch_size
        chosen = per_row_integers(given, max(1, count), "reorder takes")
        if not all(0 <= r < self.batch_size for r in chosen):
            raise ValueError(f"reorder takes a row number below {self.batch_size} for each row, not {chosen}")
        index = torch.tensor(chosen, device=self.device)
        longest = max(self.counts)

        def move(x: Tensor, layout: SlotLayout | None) -> Tensor:
            if x.shape[0] != self.batch_size:
                return x
            if layout is None:
                return x.index_select(0, index)
            kept, used = x[: len(chosen)], layout.slots_in_use(longest)  # empty slots stay where they are
            kept[:, :used] = x[:, :used].index_select(0, index)
            return kept

        self._replace_tensors(move)
        per_row = (self.counts, self.peaks, self.lengths, self.prefixes)
        self.counts, self.peaks, self.lengths, self.prefixes = ([x[r] for r in chosen] for x in per_row)
        self.batch_size = len(chosen)

    def copy(self) -> Self:
        """An independent cache with the same contents."""
        other = copy.copy(self)
        other._replace_tensors(lambda x, layout: x.clone())
        other.counts, other.peaks = list(self.counts), list(self.peaks)
        return other

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy on another device, or with another dtype of keys, values and all that has the dtype of activations."""
        of_states = [self.config.cached_per_sequence(index) for index in range(self.config.num_layers)]
        held = zip((*self.layers, *self.states), (*self.declared, *of_states), strict=True)
        declared = {id(tensors[name]): kept for tensors, own in held for name, kept in own.items()}

        def move(x: Tensor, layout: SlotLayout | None) -> Tensor:
            if dtype is None or not x.is_floating_point():
                return x.to(device=device, copy=True)
            return x.to(device=device, dtype=stored_dtype(declared.get(id(x), CachedTensor(())), dtype), copy=True)

        other = copy.copy(self)
        other._replace_tensors(move)
        other.counts, other.peaks = list(self.counts), list(self.peaks)
        other.dtype = dtype or self.dtype
        return other

    def _replace_tensors(self, change: Callable[[Tensor, SlotLayout | None], Tensor]) -> None:
        """Replace every tensor the cache holds; those of slots have a layout."""

        def table(old: dict[SlotLayout, Tensor]) -> dict[SlotLayout, Tensor]:
            return {layout: change(data, layout) for layout, data in old.items()}

        self.layers = [
            {name: change(x, layout) for name, x in tensors.items()}
            for layout, tensors in zip(self.layouts, self.layers, strict=True)
        ]
        self.states = [{name: change(x, None) for name, x in states.items()} for states in self.states]
        self.positions = table(self.positions)
        self.document_ids = None if self.document_ids is None else table(self.document_ids)
        self.cross = [{name: change(x, None) for name, x in tensors.items()} for tensors in self.cross]
        if isinstance(self.next_positions, Tensor):
            self.next_positions = change(self.next_positions, None)
        self.origins = None if self.origins is None else change(self.origins, None)
        if self.memory is not None:
            attention_mask, document_ids = (
                None if x is None else change(x, None) for x in (self.memory.attention_mask, self.memory.document_ids)
            )
            self.memory = EncoderOutput(change(self.memory.hidden, None), attention_mask, document_ids)

    def save(self, path: str | Path) -> None:
        """Write the cache as one safetensors file; `KVCache.load` reads it back."""
        write_cache(self, path_of(path, "a cache"))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """Read a cache that `save` wrote."""
        return read_cache(cls, path_of(path, "a cache"), device)


def per_row_lengths(length: int | Sequence[int], rows: int) -> list[int]:
    """A planned length for each row."""
    each = per_row_integers(length, rows, "a cache's length is")
    if min(each) < 1:
        raise ValueError(f"a cache's length must be at least 1, not {min(each)}")
    return each


def per_row_integers(given: int | Sequence[int] | Tensor, rows: int, what: str) -> list[int]:
    """One integer for each row, from one for all or a list."""
    each = given.tolist() if isinstance(given, Tensor) else given
    each = [each] * rows if type(each) is int else each
    if not isinstance(each, list | tuple) or len(each) != rows or any(type(n) is not int for n in each):
        raise ValueError(f"{what} an integer, or one for each of the {rows} rows, not {quote(given)}")
    return list(each)
