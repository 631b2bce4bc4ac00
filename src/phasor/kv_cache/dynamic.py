"""The key/value cache: a value that is passed in and remembers what a decoder has seen.

Every layer keeps its keys and values in slots. The first `sinks` tokens of a row have slots of their own, the
others go around a ring; a layer without a window has a ring as long as the cache, which never comes around.
Rows may hold different numbers of tokens. Keys are stored as they are attended to, turned by their position
once and for good, because the sequence's planned length is fixed when the cache is made.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.schema import shown
from phasor.kv_cache.slots import EMPTY, Layout, Store, Turn
from phasor.nn.sequence import SequenceArgs, SequenceInfo, order_of
from phasor.ops.attention.mask import Mask


@dataclass
class Memory:
    """An encoder's output, as a decoder attends to it."""

    hidden: Tensor
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None


@dataclass(slots=True)
class Step:
    """What one layer sees in a call, and its keys and values with those of the call's tokens added."""

    mask: Mask
    key_positions: Tensor
    turn: Turn
    keys: Store
    values: Store

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn.extend(self.keys, k), self.turn.extend(self.values, v)


class KVCache:
    """Keys and values of a decoder, made by `model.new_cache(batch_size, max_length)`.

    `length` is the sequence length that frequencies are planned for (one number or one a row), `used` the number
    of tokens held (one number, or one a row where they differ). A call with a cache equals the full forward over
    all the tokens so far at that length. No gradient flows through a cache.

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
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"a cache's {name} must be a whole number of at least {least}, not {value!r}")
        self.config, self.batch_size, self.max_length, self.spare = config, batch_size, max_length, spare
        self.lengths = planned_lengths(max_length if length is None else length, batch_size)
        self.counts = [0] * batch_size
        self.peaks = [0] * batch_size  # the most tokens each row ever held
        self.next_positions: int | Tensor = 0  # one a row where it is not the number of tokens
        self.origins: Tensor | None = None  # the first position of each row's document
        self.broken = False  # whether a call has begun and not come to its end
        self.memory: Memory | None = None  # an encoder's output, and the keys and values made of it
        self.cross: list[tuple[Tensor, Tensor]] = []
        self.layouts = [self._layout(index) for index in range(config.num_layers)]
        shape = (config.num_kv_heads, config.head_dim)
        self.keys, self.values = (
            [Store(torch.zeros((batch_size, x.slots, *shape), device=device, dtype=dtype), x) for x in self.layouts]
            for _ in ("keys", "values")
        )
        self.positions = self._table()
        self.document_ids: dict[Layout, Store] | None = None

    def _layout(self, index: int) -> Layout:
        attention = self.config.layer(index).attention
        window, sinks = attention.window, attention.sink_tokens
        if window is None or sinks + window + self.spare >= self.max_length:
            return Layout(0, self.max_length, None)
        return Layout(sinks, window + self.spare, window, attention.cap_sinks)

    def _table(self) -> dict[Layout, Store]:
        """A whole number for every slot of every layout."""
        device = self.keys[0].data.device
        return {
            x: Store(torch.zeros(self.batch_size, x.slots, dtype=torch.int64, device=device), x) for x in self.layouts
        }

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
        """Whether every layer's ring comes around, so that tokens may go on past `max_length`."""
        return all(layout.window is not None for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, an encoder's included."""
        own = sum(store.data.nbytes for store in (*self.keys, *self.values))
        return own + sum(k.nbytes + v.nbytes for k, v in self.cross)

    def places(self, tokens: Tensor, about: SequenceArgs, needs_length: bool) -> SequenceInfo:
        """Where the next tokens stand: unless told otherwise they go on from those held."""
        rows, count = tokens.shape
        if self.broken:
            raise ValueError("the last call with this cache did not come to its end: go on from a copy made before it")
        if rows != self.batch_size:
            raise ValueError(f"the cache has {self.batch_size} rows, and the tokens {rows}")
        if about.get("length") is not None:
            raise ValueError("length is the cache's own, stated when it was made: new_cache(..., length=...)")
        document_ids, attention_mask = about.get("document_ids"), about.get("attention_mask")
        held = max(self.counts) > 0
        if held and document_ids is not None and self.document_ids is None:
            raise ValueError("documents must be given from a cache's first call on")
        last = self._last(self.document_ids) if held and self.document_ids is not None else None
        if document_ids is None and last is not None:
            document_ids = last[:, None].expand(rows, count)
        order = order_of(attention_mask, document_ids)
        same = None if last is None or document_ids is None else document_ids == last[:, None]
        positions = about.get("positions")
        self._counting = positions is None
        if positions is None:
            positions = self._next(count, order, same, tokens.device)
        same_length = len(set(self.lengths)) == 1
        length = self.lengths[0] if same_length else torch.tensor(self.lengths)[:, None].expand(rows, count)
        first = self.origins if held else None
        at = SequenceInfo(positions, length if needs_length else count, attention_mask, document_ids, order, first)
        if first is not None and same is not None:
            own = replace(at, first=None).origin()
            at = replace(at, first=torch.where(same, first, own))
        return at

    def _next(self, count: int, order: Tensor | None, same: Tensor | None, device: torch.device) -> Tensor:
        """Default positions of the next tokens, `[T]` or `[B, T]`."""
        start = self.next_positions
        new = torch.arange(count, device=device) if order is None else order
        if same is not None:
            start = torch.where(same, torch.as_tensor(start, device=device).expand(self.batch_size)[:, None], 0)
            return new + start
        return new + start if isinstance(start, int) else new + start[:, None]

    def begin(self, at: SequenceInfo, rule: Mask, needs_length: bool) -> list[Step]:
        """What each layer sees in this call; `rule` is what the tokens of the call alone would see."""
        count = at.rows.shape[-1]
        kept = None if at.attention_mask is None else [row.nonzero()[:, 0] for row in at.attention_mask]
        new = [count if kept is None else len(kept[row]) for row in range(self.batch_size)]
        after = [n + m for n, m in zip(self.counts, new, strict=True)]
        self._check(at, rule, after, needs_length)
        if at.document_ids is not None and self.document_ids is None:
            self.document_ids = self._table()
        rows = self._standing(at).expand(self.batch_size, count)
        self.broken = True
        steps: dict[Layout, tuple[Mask, Tensor, Turn]] = {}
        for layout in self.positions:
            turn = Turn(layout, self.counts, after, kept, count, rows.device)
            document_ids = None
            if self.document_ids is not None:
                assert at.document_ids is not None
                document_ids = turn.extend(self.document_ids[layout], at.document_ids.expand(self.batch_size, count))
            positions = turn.extend(self.positions[layout], rows)
            steps[layout] = self._mask(turn, at, rule, count, document_ids), positions, turn
        self._coming = at, after
        return [
            Step(*steps[x], keys, values) for x, keys, values in zip(self.layouts, self.keys, self.values, strict=True)
        ]

    def _mask(self, turn: Turn, at: SequenceInfo, rule: Mask, count: int, document_ids: Tensor | None) -> Mask:
        """Who sees whom: `rule` for a first call, and otherwise by the index of every query and key."""
        if turn.how == "fresh":
            return rule
        layout, device = turn.layout, at.positions.device
        seen = Mask(causal=True, query_document_ids=at.document_ids, key_document_ids=document_ids)
        if turn.uniform and layout.window is None:
            return replace(seen, offset=turn.before[0])
        if turn.slot is not None and document_ids is None and self.spare == 0 and not layout.capped:
            return Mask(aligned=False)  # the slots hold what the query sees, and nothing else
        new = (
            torch.arange(count, device=device)[None] if at.attention_mask is None else at.attention_mask.cumsum(-1) - 1
        )
        before = torch.tensor(turn.before, device=device)
        query_at = before[:, None] + new.clamp(min=0)
        if turn.how == "joined":
            own = query_at if at.attention_mask is None else torch.where(at.attention_mask, query_at, EMPTY)
            key_at = torch.cat((layout.held(before, turn.held), own), dim=-1)
            return replace(seen, query_at=query_at, key_at=key_at)
        if layout.window is not None:
            seen = replace(seen, key_at=layout.held(torch.tensor(turn.after, device=device), turn.filled))
        return replace(seen, query_at=query_at)

    def _check(self, at: SequenceInfo, rule: Mask, after: list[int], needs_length: bool) -> None:
        if max(after) > self.max_length and not self.endless:
            raise ValueError(f"the cache holds {self.max_length} tokens, and this call makes it {max(after)}")
        if needs_length:
            for row, (total, planned) in enumerate(zip(after, self.lengths, strict=True)):
                if total > planned:
                    raise ValueError(
                        f"row {row} comes to {total} tokens, past the length {planned} the cache plans for"
                    )
        if rule.prefix_length is not None and (max(self.counts) > 0 or any(x.window is not None for x in self.layouts)):
            raise ValueError("with a cache a prefix belongs to the first call, and to a model without windows")
        if at.document_ids is not None and any(x.sinks for x in self.layouts):
            raise ValueError(
                "a cache keeps the sink tokens of a row, not of each of its documents: leave documents out"
            )

    def _standing(self, at: SequenceInfo) -> Tensor:
        """Positions to keep, `[B or 1, T]`; of several axes the furthest so far, after which text goes on."""
        if at.positions.dim() < 3:
            return at.rows
        furthest = at.positions.amax(0).cummax(-1).values
        start = self.next_positions
        return furthest.clamp(min=start - 1) if isinstance(start, int) else furthest.maximum(start[:, None] - 1)

    def finish(self) -> None:
        """Count the tokens of the call that `begin` opened."""
        at, after = self._coming
        self.broken = False
        if self.origins is None or at.document_ids is not None:
            self.origins = at.origin()[..., -1:].reshape(-1, 1)
        added = [n - m for n, m in zip(after, self.counts, strict=True)]
        self.counts = after
        self.peaks = [max(p, n) for p, n in zip(self.peaks, after, strict=True)]
        if self._counting and at.document_ids is None:
            same = len(set(added)) == 1
            self.next_positions += added[0] if same else torch.tensor(added, device=at.positions.device)
        else:
            self.next_positions = self._last(self.positions) + 1

    def _last(self, table: dict[Layout, Store]) -> Tensor:
        """The entry of each row's last token, `[B]`; zero for rows that hold none."""
        layout, store = next(iter(table.items()))
        slots = [layout.slot(n - 1) if n else 0 for n in self.counts]
        rows = torch.arange(self.batch_size, device=store.data.device)
        found = store.data[rows, torch.tensor(slots, device=store.data.device)]
        return torch.where(torch.tensor(self.counts, device=found.device) > 0, found, 0)

    def crop(self, tokens: int | Sequence[int]) -> None:
        """Undo the last tokens: one number, or one a row.

        Rings forget what they push out, so where one has come around no more than `spare` tokens (plus one) can
        be undone.
        """
        undo = whole_numbers(tokens, self.batch_size, "crop takes")
        after = [n - u for n, u in zip(self.counts, undo, strict=True)]
        for row, (u, n) in enumerate(zip(undo, after, strict=True)):
            if u < 0 or n < 0:
                raise ValueError(f"crop undoes 0 to {self.counts[row]} tokens in row {row}, not {u}")
            for layout in self.layouts:
                if (
                    layout.window is not None
                    and self.peaks[row] > layout.slots
                    and n < self.peaks[row] - 1 - self.spare
                ):
                    raise ValueError(
                        f"the window's ring has come around: of row {row} at most "
                        f"{self.spare + 1 - (self.peaks[row] - self.counts[row])} tokens can be undone, not {u}; "
                        "make the cache with more spare"
                    )
        self.counts = after
        if not any(undo):
            return
        if isinstance(self.next_positions, int) and self.uniform:
            self.next_positions -= undo[0]
        else:
            ahead = self._last(self.positions) + 1
            self.next_positions = torch.where(torch.tensor(after, device=ahead.device) > 0, ahead, 0)
        if max(after) == 0:
            self.next_positions, self.origins, self.document_ids = 0, None, None

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Let row `i` go on from what row `rows[i]` holds: what a beam search does at every step.

        Rows that are not named are forgotten, and with fewer numbers than rows the cache becomes smaller.
        """
        given = rows.tolist() if isinstance(rows, Tensor) else rows
        count = min(len(given), self.batch_size) if isinstance(given, list | tuple) else self.batch_size
        chosen = whole_numbers(given, max(1, count), "reorder takes")
        if not all(0 <= r < self.batch_size for r in chosen):
            raise ValueError(f"reorder takes a row number below {self.batch_size} for each row, not {chosen}")
        at = torch.tensor(chosen, device=self.keys[0].data.device)
        filled = max(self.counts)

        def moved(x: Tensor, layout: Layout | None) -> Tensor:
            if x.shape[0] != self.batch_size:
                return x
            if layout is None:
                return x.index_select(0, at)
            kept, held = x[: len(chosen)], layout.filled(filled)  # empty slots stay where they are
            kept[:, :held] = x[:, :held].index_select(0, at)
            return kept

        self._each(moved)
        counted = (self.counts, self.peaks, self.lengths)
        self.counts, self.peaks, self.lengths = ([x[r] for r in chosen] for x in counted)
        self.batch_size = len(chosen)

    def copy(self) -> Self:
        """A cache of its own with the same contents."""
        other = copy.copy(self)
        other._each(lambda x, layout: x.clone())
        other.counts, other.peaks = list(self.counts), list(self.peaks)
        return other

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy on another device, or with keys and values of another type."""
        other = copy.copy(self)
        other._each(lambda x, layout: x.to(device=device, dtype=dtype if x.is_floating_point() else None, copy=True))
        other.counts, other.peaks = list(self.counts), list(self.peaks)
        return other

    def _each(self, change: Callable[[Tensor, Layout | None], Tensor]) -> None:
        """Replace every tensor the cache holds; those of slots have a layout."""

        def stores(old: list[Store]) -> list[Store]:
            return [Store(change(store.data, store.layout), store.layout) for store in old]

        def table(old: dict[Layout, Store]) -> dict[Layout, Store]:
            return dict(zip(old, stores(list(old.values())), strict=True))

        self.keys, self.values, self.positions = stores(self.keys), stores(self.values), table(self.positions)
        self.document_ids = None if self.document_ids is None else table(self.document_ids)
        self.cross = [(change(k, None), change(v, None)) for k, v in self.cross]
        if isinstance(self.next_positions, Tensor):
            self.next_positions = change(self.next_positions, None)
        self.origins = None if self.origins is None else change(self.origins, None)
        if self.memory is not None:
            attention_mask, document_ids = (
                None if x is None else change(x, None) for x in (self.memory.attention_mask, self.memory.document_ids)
            )
            self.memory = Memory(change(self.memory.hidden, None), attention_mask, document_ids)

    def save(self, path: str | Path) -> None:
        """Write the cache as one safetensors file; `Cache.load` reads it back."""
        numbers = {
            "config": self.config.to_dict(),
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "spare": self.spare,
            "length": self.lengths,
            "counts": self.counts,
            "peaks": self.peaks,
            "next_positions": self.next_positions if isinstance(self.next_positions, int) else None,
        }
        path = Path(path)
        staged = path.with_name(path.name + ".part")
        try:
            save_file({n: x.contiguous() for n, x in self._tensors().items()}, staged, {"cache": json.dumps(numbers)})
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """Read a cache that `save` wrote."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                numbers = json.loads((file.metadata() or {})["cache"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(f"{path} is not a cache that phasor saved: {error}") from None
        made = cls(
            ModelConfig.from_dict(numbers["config"]),
            numbers["batch_size"],
            numbers["max_length"],
            length=numbers["length"],
            spare=numbers["spare"],
            device=device,
            dtype=tensors["keys.0"].dtype,
        )
        made.counts, made.peaks = numbers["counts"], numbers["peaks"]
        made.next_positions = tensors.get("next_positions", numbers["next_positions"])
        made.origins = tensors.get("origins")
        if any(name.startswith("documents.") for name in tensors):
            made.document_ids = made._table()
        if "memory.hidden" in tensors:
            attention_mask, document_ids = tensors.get("memory.attention_mask"), tensors.get("memory.document_ids")
            made.memory = Memory(tensors["memory.hidden"], attention_mask, document_ids)
        layers = range(sum(name.startswith("cross_keys.") for name in tensors))
        made.cross = [(tensors[f"cross_keys.{i}"], tensors[f"cross_values.{i}"]) for i in layers]
        for name, tensor in made._tensors().items():
            if name in tensors and tensor is not tensors[name]:
                tensor.copy_(tensors[name])
        return made

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        named: dict[str, Tensor | None] = {"origins": self.origins}
        if isinstance(self.next_positions, Tensor):
            named["next_positions"] = self.next_positions
        for name, stores in (("keys", self.keys), ("values", self.values)):
            named |= {f"{name}.{i}": store.data for i, store in enumerate(stores)}
        for name, table in (("positions", self.positions), ("document_ids", self.document_ids or {})):
            named |= {f"{name}.{i}": store.data for i, store in enumerate(table.values())}
        for i, (k, v) in enumerate(self.cross):
            named |= {f"cross_keys.{i}": k, f"cross_values.{i}": v}
        if self.memory is not None:
            named |= {f"memory.{name}": x for name, x in vars(self.memory).items()}
        return {name: x for name, x in named.items() if x is not None}


def planned_lengths(length: int | Sequence[int], rows: int) -> list[int]:
    """A planned length for each row."""
    each = whole_numbers(length, rows, "a cache's length is")
    if min(each) < 1:
        raise ValueError(f"a cache's length must be at least 1, not {min(each)}")
    return each


def whole_numbers(given: int | Sequence[int] | Tensor, rows: int, what: str) -> list[int]:
    """One whole number for each row, from one for all or a list."""
    each = given.tolist() if isinstance(given, Tensor) else given
    each = [each] * rows if type(each) is int else each
    if not isinstance(each, list | tuple) or len(each) != rows or any(type(n) is not int for n in each):
        raise ValueError(f"{what} a whole number, or one for each of the {rows} rows, not {shown(given)}")
    return list(each)
