"""`Engine`: requests of many callers, answered together by one model."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from phasor.config import Extension
from phasor.config.generation import GenerationConfig
from phasor.config.schema import check_integer, unknown
from phasor.generation.engine.choose import add_tokens, read_tokens
from phasor.generation.engine.extended import ExtendedModels
from phasor.generation.engine.forward import run_batch
from phasor.generation.engine.graph_steps import GraphSteps, LaunchedStep
from phasor.generation.engine.handle import Handle, LogitsProcessor
from phasor.generation.engine.memory import default_chunk, default_pages, default_rows
from phasor.generation.engine.row import EngineRow
from phasor.generation.engine.scheduler import EngineBatch, Scheduler
from phasor.generation.generated import Generated
from phasor.generation.request import GenerationRequest, build_request
from phasor.kv_cache.paged import PagedKVCache
from phasor.nn.mode import eval_mode, modules_in_eval_mode
from phasor.nn.positions.base import Position
from phasor.transformer import Stack, Transformer


class QueueFullError(RuntimeError):
    """As many requests wait as may wait: try again later."""


@dataclass
class EngineStats:
    """What an engine is doing, and what it has done since it was created.

    `prompt_tokens` were read, without those that other requests had read before (`cached_tokens`). A row is `set_back`
    where pages run out: it is computed again.
    """

    waiting: int = 0
    running: int = 0
    pages: int = 0
    pages_held: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    set_back: int = 0


class Engine:
    """Continuous batching: requests join and leave between the steps of a model.

    Up to `max_rows` continuations run at once (16, or 256 on a GPU); their keys and values are in `pages` pages of
    `page_size` tokens. Up to `max_waiting` requests wait, and one more raises a `QueueFullError`. A prompt is read in
    chunks of up to `prefill_chunk` tokens (512, or 8,192 on a GPU), beside the rows that decode. Prompts that begin
    alike share their pages, unless `share_prefixes` is False. With `deterministic` a request gets the same bits alone
    and among others.

    `submit` returns a `Handle`. Work is done by `step`, which handles call where no thread does, or by the thread that
    `start` begins. All methods may be called from any thread.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> with Engine(model, max_rows=2) as engine:
    ...     handles = [engine.submit([1, 2, n], max_new_tokens=5) for n in range(3)]
    ...     [len(handle.result().tokens) for handle in handles]
    [5, 5, 5]
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_rows: int | None = None,
        pages: int | None = None,
        page_size: int = 16,
        prefill_chunk: int | None = None,
        max_waiting: int = 1024,
        deterministic: bool = False,
        share_prefixes: bool = True,
        extension: Extension | str | None = None,
    ) -> None:
        if not isinstance(model, Transformer) or model.decoder is None:
            raise ValueError("an engine needs a decoder or an encoder-decoder")
        if model.front_end is not None:
            raise ValueError("an engine reads tokens, and the source of this model are features: use phasor.generate")
        device = model.tokens.weight.device
        max_rows = default_rows(device) if max_rows is None else max_rows
        prefill_chunk = default_chunk(device) if prefill_chunk is None else prefill_chunk
        for name, value in {"max_rows": max_rows, "page_size": page_size, "prefill_chunk": prefill_chunk}.items():
            check_integer(f"an engine's {name}", value, 1, 1 << 31)
        check_integer("an engine's max_waiting", max_waiting, 0, 1 << 31)
        if pages is not None:
            check_integer("an engine's pages", pages, 1, 1 << 31)
        self.model, self.deterministic, self.max_waiting, self.extension = model, deterministic, max_waiting, extension
        self._models, self._modules = ExtendedModels(model), list(model.modules())
        if extension is not None:
            check_extension(extension)
        pages = default_pages(model, max_rows, page_size) if pages is None else pages + 1
        cache = PagedKVCache(
            model.config,
            max_rows=max_rows,
            pages=pages,
            page_size=page_size,
            most_new=prefill_chunk,
            device=device,
            dtype=model.tokens.dtype,
        )
        share_prefixes = share_prefixes and not cache.keeps_states and model.encoder is None
        self._cache = cache
        self._scheduler = Scheduler(cache, prefill_chunk, deterministic=deterministic, share_prefixes=share_prefixes)
        self._graphs = None if deterministic else GraphSteps(cache)
        self._launched: list[LaunchedStep] = []  # by the last step, whose tokens are not read yet
        self._launching: list[LaunchedStep] = []  # by this one
        self._stats = EngineStats()
        self._new: deque[Handle] = deque()
        self._handles: dict[Handle, None] = {}  # those that have begun and not ended
        self._rows = 0  # of requests that have not ended
        self._work = threading.Condition()  # guards what is new, and the number of rows
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self,
        prompt: str | Sequence[int],
        options: GenerationConfig | None = None,
        *,
        logprobs: int | None = None,
        extension: Extension | str | None = None,
        logits_processor: LogitsProcessor | None = None,
        on_piece: Callable[[Generated | None], None] | None = None,
        start: int | None = None,
        as_text: bool = False,
        **fields: Any,
    ) -> Handle:
        """Begin a request, with the options of `phasor.generate`.

        With `as_text` what follows a prompt of token ids is text too.
        `logprobs` asks for the log-probability of each token, and of that many of the likeliest in its place.
        `extension` is a rotary extension of this request alone, or the name of one, which is used where prompt and new
        tokens are longer than the model was trained at. `logits_processor` is called with the prompt, the new tokens
        and the scores `[vocab]` of the next one, and returns other scores. `on_piece` is called in the thread that runs
        the engine with every piece, and with None at the end.
        """
        extension = self.extension if extension is None else check_extension(extension)
        request = self._build(self.model, prompt, options, fields, start, logprobs, as_text)
        self._check_size(request)
        if extension is not None:
            most = request.planned_lengths(request.decoder_prompts())
            model = self._models.get(extension, max(most) if most else request.longest(request.decoder_prompts()))
            if model is not self.model:
                request = self._build(model, prompt, options, fields, start, logprobs, as_text)
        return self.submit_request(
            request, logits_processor=logits_processor, top_logprobs=logprobs or 0, on_piece=on_piece
        )

    @property
    def most_rows(self) -> int:
        """How many continuations run and wait where one more request is refused."""
        return self.max_waiting + self._cache.max_rows

    def check_queue(self) -> None:
        """Raise a `QueueFullError` where one more request would be refused."""
        if self._rows >= self.most_rows:
            raise QueueFullError(f"{self.max_waiting} requests wait already, as many as may: try again later")

    def submit_request(self, request: GenerationRequest, **options: Any) -> Handle:
        """Begin a request of one prompt that is built already; the options are those of a `Handle`."""
        handle = Handle(self, request, **options)
        handle.salt = salt(request)
        with self._work:
            if self._closed:
                raise ValueError("the engine is closed")
            self.check_queue()
            self._new.append(handle)
            self._rows += len(handle.rows)
            self._work.notify_all()
        return handle

    def _build(
        self,
        model: Transformer,
        prompt: Any,
        options: GenerationConfig | None,
        fields: dict[str, Any],
        start: int | None,
        logprobs: int | None,
        as_text: bool,
    ) -> GenerationRequest:
        request = build_request(
            model,
            prompt,
            options,
            fields,
            start=start,
            details=logprobs is not None,
            streams="num_beams" not in fields,
            as_text=as_text,
        )
        own = request.options
        if request.is_batch:
            raise ValueError("an engine takes one prompt per request: submit each of them")
        if own.num_beams > 1 or own.penalty_alpha or own.prompt_lookup_tokens or own.compile:
            raise ValueError(
                "an engine decodes greedily and samples: num_beams, penalty_alpha, prompt_lookup_tokens and compile "
                "are for phasor.generate"
            )
        return request

    def _check_size(self, request: GenerationRequest) -> None:
        prompts = request.decoder_prompts()
        most = request.options.max_new_tokens
        tokens = None if most is None else len(prompts[0]) + most
        if not self._cache.fits(tokens):
            held = (max(t.pool.count for t in self._cache.tables.values()) - 1) * self._cache.page_size
            raise ValueError(
                f"the engine has pages for {held} tokens, and prompt and new tokens are "
                f"{'without end' if tokens is None else tokens}"
            )

    def step(self) -> bool:
        """Read the next tokens of all rows, and choose new ones; whether there is anything left to do."""
        if self._new:  # since the last request the model may have got other modules
            self._modules = list(self.model.modules())
        with modules_in_eval_mode(self._modules):
            return self._step()

    def _step(self) -> bool:
        with self._stepping:
            self._take_new()
            if not self._handles:
                self._launched, self._launching = [], []
                return False
            with torch.inference_mode():
                self._scheduler.admit()
                for batch in self._scheduler.prompt_batches():
                    self._run(batch, launch=True)
                self._decode()
            self._stats.steps += 1
            self._update_stats()
            return bool(self._handles)

    def _take_new(self) -> None:
        """Let new requests wait for a row, and end those that were cancelled."""
        with self._work:
            new = list(self._new)
            self._new.clear()
        if new and self._graphs is not None:
            self._graphs.refresh()
        for handle in new:
            self._handles[handle] = None
            self._scheduler.waiting.append(handle.rows[0])
        with torch.inference_mode():
            for handle in [handle for handle in self._handles if handle.cancelled]:
                self._stats.cancelled += 1
                self._end(handle, clear=True)
        self._update_stats()

    def _decode(self) -> None:
        """Begin a step of the rows that decode, and read the tokens of the one before, and of prompts before that.

        Those of this step are read at once where the host chooses some of them.
        """
        for batch in self._scheduler.token_batches():
            try:
                step = None if self._graphs is None else self._graphs.launch(batch)
            except Exception as error:
                self._fail_all(batch.rows, error)
                continue
            if step is not None:
                self._count_prompts(batch)
                self._launching.append(step)
                continue
            self._read_launched(all=True)  # an eager step takes tokens from the host
            rows = [row for row in batch.rows if not row.ended]
            if rows:
                self._run(replace(batch, rows=rows, new=batch.new[: len(rows)]), launch=False)
        self._read_launched(all=any(step.needs_logits for step in self._launching))
        self._launched, self._launching = self._launching, []

    def _read_launched(self, *, all: bool) -> None:
        """Read the tokens of the last step, or of this one too."""
        steps, self._launched = self._launched, []
        if all:
            steps, self._launching = steps + self._launching, []
        for step in steps:
            for row in step.rows:
                if row.launched is not None and row.launched[0] is step:
                    row.launched = None
            if step.needs_logits:
                self._choose(step.rows, step.logits)
            elif rows := [row for row in step.rows if not row.ended]:
                failed = read_tokens(step)
                self._scheduler.remember(rows)
                self._hand_out(rows, failed)

    def _run(self, batch: EngineBatch, *, launch: bool) -> None:
        """Run a batch, choose the next token of each row that has read all of its text, and hand out what is new.

        With `launch` that may be left to the next step, as far as the likeliest tokens are chosen.
        """
        sources = sum(row.handle.prompt_tokens for row in batch.rows) if batch.reads_sources else 0
        try:
            logits = run_batch(self._cache, batch)
        except Exception as error:
            self._fail_all(batch.rows, error)
            return
        self._count_prompts(batch, sources)
        step = None
        if launch and self._graphs is not None:
            step = self._graphs.choose(batch.rows, logits, sum(len(step.rows) for step in self._launching))
        if step is None:
            self._choose(batch.rows, logits)
        else:
            self._scheduler.remember(batch.rows)
            self._launching.append(step)

    def _count_prompts(self, batch: EngineBatch, sources: int = 0) -> None:
        """Count what a call has read of prompts; those of an encoder-decoder are the sources."""
        if batch.model.encoder is None:
            read = zip(batch.rows, batch.new, strict=True)
            sources = sum(new for row, new in read if row.count <= len(row.state.prompt))
        self._stats.prompt_tokens += sources

    def _choose(self, called: Sequence[EngineRow], logits: Tensor) -> None:
        """Choose the next tokens of rows by logits `[B, vocab]`; with one that has read its prompt others begin."""
        rows: list[EngineRow] = []
        index: list[int] = []
        for i, row in enumerate(called):
            if row.ended:
                continue
            self._scheduler.remember([row])
            if row.pending == 0:
                own = [row, *self._scheduler.fork(row)]
                rows += own
                index += [i] * len(own)
        if rows:
            self._hand_out(rows, add_tokens(rows, logits if index == list(range(len(logits))) else logits[index]))

    def _hand_out(self, rows: Sequence[EngineRow], failed: dict[EngineRow, Exception]) -> None:
        """Hand out the new tokens of rows, and end the requests for which there is none."""
        self._stats.new_tokens += len(rows) - len(failed)
        for handle, reason in {row.handle: reason for row, reason in failed.items()}.items():
            self._fail(handle, reason)
        each = {row.handle: None for row in rows if row.state.done or row.handle.needs_each_token}
        for handle in each:
            if handle in self._handles:
                self._deliver(handle)
        for row in rows:
            row.handle.wake_reader()

    def _deliver(self, handle: Handle) -> None:
        """Hand out the new tokens of a request where that is not left to its reader, and end its rows that are done."""
        if handle.needs_each_token:
            try:
                for piece in handle.read_pieces():
                    handle.deliver(piece)
            except Exception as error:  # of a tokenizer, or of a caller's on_piece
                self._fail(handle, error)
                return
        for row in handle.rows:
            if row.state.done and not row.ended:
                self._end_row(row)
        if all(row.ended for row in handle.rows):
            self._stats.finished += 1
            self._end(handle)

    def _fail_all(self, rows: Sequence[EngineRow], error: Exception) -> None:
        """End the requests of a call that failed, such as for too little memory, and no others."""
        for handle in dict.fromkeys(row.handle for row in rows):
            if handle in self._handles:
                self._fail(handle, error)

    def _fail_everything(self, error: Exception) -> None:
        """End all requests for an error that is of none of them: nobody waits for what does not come."""
        with self._stepping:
            self._launched, self._launching = [], []
            for handle in list(self._handles):
                with suppress(Exception):  # of a device that is lost
                    self._fail(handle, error)

    def _fail(self, handle: Handle, error: Exception) -> None:
        self._stats.failed += 1
        self._end(handle, error, clear=True)

    def _end(self, handle: Handle, error: Exception | None = None, *, clear: bool = False) -> None:
        del self._handles[handle]
        try:
            for row in handle.rows:
                if not row.ended:
                    self._end_row(row, clear=clear)
            self._stats.cached_tokens += handle.cached_tokens
        finally:
            handle.end(error)

    def _end_row(self, row: EngineRow, *, clear: bool = False) -> None:
        self._scheduler.end(row, clear=clear)
        with self._work:
            self._rows -= 1

    def _update_stats(self) -> None:
        tables = list(self._cache.tables.values())
        self._stats.waiting, self._stats.running = len(self._scheduler.waiting), len(self._scheduler.running)
        self._stats.pages = sum(table.pool.count - 1 for table in tables)
        self._stats.pages_held = sum(table.pool.held for table in tables)
        self._stats.set_back = self._scheduler.set_back

    def stats(self) -> EngineStats:
        """What the engine is doing, and what it has done."""
        with self._work:
            found = EngineStats(**vars(self._stats))
            found.waiting += len(self._new)
            return found

    def start(self) -> Self:
        """Begin a thread that runs the engine until it is closed."""
        with self._work:
            if self._closed:
                raise ValueError("the engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="phasor-engine", daemon=True)
                self._thread.start()
        return self

    def _loop(self) -> None:
        while not self._closed:
            with eval_mode(self.model):
                try:
                    while not self._closed and self._step():
                        pass
                except Exception as error:
                    self._fail_everything(error)
            with self._work:
                if not self._new and not self._closed:
                    self._work.wait()

    def advance(self) -> bool:
        """Do a step where no thread runs the engine; whether this one did."""
        if self._thread is not None or self._closed:
            return False
        self.step()
        return True

    def wake(self) -> None:
        """Let the engine's thread look at what has changed."""
        with self._work:
            self._work.notify_all()

    def close(self) -> None:
        """End the thread, and cancel what has not ended."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._stepping:
            for handle in [*self._new, *self._handles]:
                handle.cancelled = True
            self._take_new()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_extension(extension: Any) -> Extension | str:
    """An extension or the name of one, as it is; another name is refused."""
    if not isinstance(extension, Extension) and extension not in Extension.kinds:
        raise unknown("extension", extension, Extension.kinds)
    return extension


def salt(request: GenerationRequest) -> bytes:
    """What keys and values depend on beside the tokens: the frequencies of the positions."""
    stack, planned = cast(Stack, request.model.decoder), request.planned_lengths(request.decoder_prompts())
    schemes = [cast(Position, scheme) for scheme in stack.positions]
    keys = [None if planned is None else scheme.length_key(planned[0]) for scheme in schemes]
    return hashlib.sha256(repr((stack.schemes, keys)).encode()).digest()
