"""Which rows hold pages, and which tokens the next calls of the model read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from phasor.generation.engine.row import EngineRow
from phasor.kv_cache.paged import PagedKVCache
from phasor.transformer import Transformer

TILE = 8  # rows of a decoding call of a deterministic engine
LOOKAHEAD = 8  # chunks that begun rows of one chunk have to read, so that calls find rows of similar lengths
MOST_TRIED = 64  # waiting rows that a step finds not to fit before it looks for no others


@dataclass(frozen=True)
class EngineBatch:
    """One call of the model: rows, how many tokens each reads, and how many rows fill it up to a fixed size."""

    rows: list[EngineRow]
    new: list[int]
    fill: int = 0
    round_up: bool = False

    @property
    def model(self) -> Transformer:
        return self.rows[0].handle.request.model

    @property
    def reads_sources(self) -> bool:
        """Whether the encoder reads their prompts first."""
        return self.rows[0].needs_source


class Scheduler:
    """Rows that wait, in the order in which they came, and those that run.

    A row is begun where there are pages for all it has to read. One that does not fit is passed by later ones that do,
    by as many as may run at once; then they wait for it. Where pages run out later, the row that began last is set
    back: it waits at the front, is passed by none, and reads its prompt and its new tokens again. Prompts are read in
    the order in which rows began, but a longer one than a chunk takes turns with the one that has least to read.

    A deterministic scheduler makes calls of sizes that depend on the row alone: its prompt in chunks that begin at
    multiples of `chunk`, by itself, and each new token in a call of `TILE` rows that attend to as many pages, or by
    itself where experts would compute as many of its tokens as are sent to them.
    """

    def __init__(self, cache: PagedKVCache, chunk: int, *, deterministic: bool, share_prefixes: bool) -> None:
        self.cache, self.chunk, self.deterministic, self.share_prefixes = cache, chunk, deterministic, share_prefixes
        self.multiple = math.lcm(chunk, cache.page_size) if deterministic else 1
        self.lookahead = chunk if deterministic else LOOKAHEAD * chunk
        config = cache.config
        has_experts = any(config.layer(i).feedforward.experts is not None for i in range(config.num_layers))
        self.tile = 1 if has_experts else TILE
        self.waiting: deque[EngineRow] = deque()
        self.running: list[EngineRow] = []  # the one that began first is first
        self.set_back = 0  # how often a row was
        self.last_first: EngineRow | None = None  # the row for which the last prompts were chosen

    def admit(self) -> None:
        """Begin waiting rows while there is room for them and the others have less than the lookahead to read.

        Those that take turns, being longer than a chunk, are not counted.
        """
        if not self.waiting:
            return
        reading = [row for row in self.running if self.reads_prompt(row)]
        to_read, begun = [row.pending for row in reading], [row for row in reading if row.count]
        passed: list[EngineRow] = []  # those at the front, which do not fit
        while self.waiting and self.cache.free and sum(n for n in to_read if n <= self.chunk) < self.lookahead:
            row = self.waiting[len(passed)]
            if row.launched is not None:  # it was set back before its last token was read
                return
            # What the others are reading, and a page for the next tokens of each of them.
            spare = -(-sum(to_read) // self.cache.page_size) + len(self.running)
            if self.begin(row, begun, spare, is_next=not passed):
                del self.waiting[len(passed)]
                to_read.append(row.pending)
                for other in passed:
                    other.passed_by += 1
            else:
                passed.append(row)
            most = max((other.passed_by for other in passed), default=0)
            if most >= self.cache.max_rows or len(passed) in (len(self.waiting), MOST_TRIED):
                return

    def begin(self, row: EngineRow, begun: list[EngineRow], spare: int, *, is_next: bool) -> bool:
        """Let a row run if no other does, or if there are pages for all it has to read, and some to spare.

        What others have read of it counts for the next in line alone: to look for that takes time in every step.
        """
        handle, alone = row.handle, not self.running
        if not (alone or (is_next and self.share_prefixes) or self.cache.room_for_new(row.pending, spare)):
            return False
        lengths = handle.request.planned_lengths([row.state.prompt])
        row.cached = self.cache.new_row(length=lengths[0] if lengths else None, salt=handle.salt)
        self.find_prefix(row, begun)
        if alone or self.cache.room_for(row.cached, row.pending, spare):
            self.running.append(row)
            return True
        if row.count:
            begun.pop()
        self.cache.release(row.cached)
        row.cached = None
        return False

    def find_prefix(self, row: EngineRow, begun: list[EngineRow]) -> None:
        """Let a row that has read nothing begin with what others have read; it is then `begun` too."""
        if self.share_prefixes and row.cached is not None and row.count == 0 and not self.waits_for_prefix(row, begun):
            found = self.cache.find_prefix(row.cached, self.shareable(row), self.multiple)
            if row.index == 0 and not row.state.new:  # further samples find what this one has read
                row.handle.cached_tokens = found
            if found:
                begun.append(row)

    def waits_for_prefix(self, row: EngineRow, begun: list[EngineRow]) -> bool:
        """Whether a row, which has read nothing, begins with what one that has read a part of its text reads next."""
        if not self.share_prefixes or row.count:
            return False
        multiple, own = math.lcm(self.multiple, self.cache.page_size), self.shareable(row)
        for other in begun:
            if other.handle.salt == row.handle.salt:
                stop = (other.count // multiple + 1) * multiple
                text = self.shareable(other)
                if len(own) > stop <= len(text) and own[stop - 1] == text[stop - 1] and own[:stop] == text[:stop]:
                    return True
        return False

    def shareable(self, row: EngineRow) -> list[int]:
        """The tokens whose keys and values are the same bits for all rows that begin with them."""
        return row.state.prompt if self.deterministic else row.text

    def remember(self, rows: Sequence[EngineRow]) -> None:
        """Let other rows find what rows have read."""
        if not self.share_prefixes:
            return
        for row in rows:
            if row.cached is not None and row.cached.count >= (row.cached.num_keys + 1) * self.cache.page_size:
                own = self.shareable(row)
                stop = len(own) // self.multiple * self.multiple if self.deterministic else None
                self.cache.remember(row.cached, own, stop)

    def fork(self, row: EngineRow) -> list[EngineRow]:
        """Begin the rows with the same prompt, which a row has just read, as far as there is room; others wait."""
        begun = []
        for follower in row.followers:
            if follower.ended:
                continue
            if self.cache.free and row.cached is not None:
                follower.cached = self.cache.fork(row.cached)
                self.running.append(follower)
                begun.append(follower)
            else:
                self.waiting.appendleft(follower)
        row.followers = []
        return begun

    def end(self, row: EngineRow, *, clear: bool = False) -> None:
        """Free what a row holds; `clear` where it may hold what is not a number."""
        row.ended = True
        if row is self.last_first:
            self.last_first = None
        if row.cached is None:
            if row in self.waiting:
                self.waiting.remove(row)
            return
        self.cache.release(row.cached, clear=clear)
        row.cached = None
        self.running.remove(row)

    def reads_prompt(self, row: EngineRow) -> bool:
        """Whether a row has more to read than the last token that was chosen."""
        if self.deterministic:
            return row.count < len(row.state.prompt)
        return row.cached is not None and (row.pending > 1 or row.cached.count == 0)

    def prompt_batches(self) -> Iterator[EngineBatch]:
        """Calls that read prompts, of about `chunk` tokens together; each is run before the next is asked for."""
        budget = self.chunk
        rows = [row for row in self.running if self.reads_prompt(row)]
        while budget > 0 and rows:
            begun = [row for row in self.running if row.count and self.reads_prompt(row)]
            ready = [row for row in rows if not self.waits_for_prefix(row, begun)]
            if not ready:
                return
            for row in ready:
                self.find_prefix(row, begun)
            self.last_first = self.next_row(ready)
            batch = self.next_prompts(self.last_first, ready)
            rows = [row for row in rows if row not in batch.rows]
            budget -= max(batch.new) * len(batch.rows)
            yield from self.reserve(batch)

    def next_row(self, rows: list[EngineRow]) -> EngineRow:
        """The oldest row; after a chunk of that the one that has least to read, so that it need not wait for all."""
        return min(rows, key=lambda row: row.pending) if rows[0] is self.last_first else rows[0]

    def next_prompts(self, first: EngineRow, rows: list[EngineRow]) -> EngineBatch:
        """The next tokens of a row, and of those that have about as many to read: all are padded to the most.

        A deterministic call reads those of one row.
        """
        if self.deterministic:
            most = self.chunk - first.count % self.chunk
            return EngineBatch([first], [min(most, len(first.state.prompt) - first.count)])
        model, needs_source, about = first.handle.request.model, first.needs_source, min(first.pending, self.chunk)
        alike = [
            (min(row.pending, self.chunk), row)
            for row in rows
            if row.handle.request.model is model and row.needs_source == needs_source
        ]
        batch = EngineBatch([], [])
        for new, row in sorted(alike, key=lambda each: (each[1] is not first, abs(each[0] - about))):
            if batch.rows and max(*batch.new, new) * (len(batch.rows) + 1) > self.chunk:
                break
            batch.rows.append(row)
            batch.new.append(new)
        return batch

    def token_batches(self) -> Iterator[EngineBatch]:
        """Calls that read one token of each row that has read its prompt; each is run before the next is asked for."""
        groups: dict[Hashable, list[EngineRow]] = {}
        for row in self.running:
            if not self.reads_prompt(row) and not row.computes_last:
                groups.setdefault(self.group(row), []).append(row)
        size = self.tile if self.deterministic else self.cache.max_rows
        for rows in groups.values():
            for start in range(0, len(rows), size):
                tile = rows[start : start + size]
                yield from self.reserve(EngineBatch(tile, [1] * len(tile)))

    def group(self, row: EngineRow) -> Hashable:
        """What rows of one call have in common."""
        model = id(row.handle.request.model)
        return (model, *self.cache.sizes(row.cached)) if self.deterministic and row.cached is not None else model

    def reserve(self, batch: EngineBatch) -> Iterator[EngineBatch]:
        """The batch with pages for all of its tokens; rows that began later are set back where there are too few.

        There is none where that are all of its rows.
        """
        for row, new in zip(batch.rows, batch.new, strict=True):
            if row.cached is not None and row.cached.count + new <= row.cached.reserved:
                continue
            while row.cached is not None and not self.cache.room_for(row.cached, new):
                self.set_row_back(self.running[-1])
            if row.cached is not None:
                self.cache.reserve(row.cached, new)
        kept = [(row, new) for row, new in zip(batch.rows, batch.new, strict=True) if row.cached is not None]
        if kept:
            fill = self.tile - len(kept) if self.deterministic and not self.reads_prompt(kept[0][0]) else 0
            yield EngineBatch([row for row, _ in kept], [new for _, new in kept], fill, round_up=self.deterministic)

    def set_row_back(self, row: EngineRow) -> None:
        """Let a row wait and begin again; before it has chosen a token, it may hold what is not a number."""
        assert row.cached is not None
        self.cache.release(row.cached, clear=not row.state.new)
        row.cached = None
        self.running.remove(row)
        self.waiting.appendleft(row)
        row.passed_by = self.cache.max_rows
        self.set_back += 1
