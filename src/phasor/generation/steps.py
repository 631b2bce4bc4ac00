"""Steps that follow each other on the device, as one CUDA graph each: what one finds likeliest, the next one reads.

The host launches steps ahead and looks at their tokens as they arrive; it never keeps the device waiting.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from phasor.generation import fused_step
from phasor.generation.compiled import can_compile, compiled_step, step
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.moe import Experts
from phasor.ops import dispatch
from phasor.ops.constants import cached_constants
from phasor.transformer import Transformer

CAPTURING = threading.Lock()  # torch captures one graph at a time
AHEAD = 8  # steps launched before the tokens of the first of them are looked at


class Runs(Protocol):
    """What runs steps: `launch` begins another, and `read` waits for the tokens of the earliest not read yet."""

    def launch(self) -> None: ...

    def read(self) -> list[int]: ...


def ahead(runner: Runs, most: int | None) -> Iterator[list[int]]:
    """The tokens of one step after the other, `most` of them or without end; the first is launched already."""
    launched, read = 1, 0
    while most is None or read < most:
        while launched <= read + AHEAD and (most is None or launched < most):
            runner.launch()
            launched += 1
        yield runner.read()
        read += 1


class Steps:
    """A cache of its own, and the step of one token a row over it, made once for all texts of about one length."""

    def __init__(self, model: Transformer, rows: int, room: int, compiles: bool) -> None:
        self.device = model.tokens.weight.device
        self.empty = model.new_cache(rows, room)
        self.state = StaticKVCache(self.empty)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.history = self.tokens.new_zeros(AHEAD + 2, rows)
        self.turn = self.tokens.new_zeros(1)
        self.launched = self.taken = 0
        on_gpu = self.device.type == "cuda"
        self.seen = torch.zeros(self.history.shape, dtype=torch.int64, pin_memory=on_gpu)
        body = self._body(model, compiles)
        self.fused = body if isinstance(body, fused_step.FusedStep) else None  # a graph does not keep its buffers
        if on_gpu:
            self.beside, self.ran = torch.cuda.Stream(self.device), torch.cuda.Event()
            self.copied = [torch.cuda.Event() for _ in self.history]
            with CAPTURING, torch.cuda.device(self.device):
                self.run = captured(body)
            self.constants = cached_constants()  # which the graph reads, and does not keep either
        else:
            self.run = body

    def _body(self, model: Transformer, compiles: bool) -> Callable[[], Tensor]:
        """One step on the buffers, in the quickest form there is for the model."""
        state, tokens, history, turn = self.state, self.tokens, self.history, self.turn
        if fused_step.why_not(model) is None:
            return fused_step.FusedStep(model, state, tokens, history, turn)
        form = compiled_step() if compiles else step

        def plain() -> Tensor:
            logits = form(model, state, tokens)
            fused_step.keep_likeliest(logits, tokens, history, turn)
            return logits

        return plain

    def fresh(self) -> KVCache:
        """The cache with nothing in it, for the prompts to be read into."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self.ran)  # the steps of the last text
        for store in (*self.empty.keys, *self.empty.values):
            store.data.zero_()
        cache = copy.copy(self.empty)
        cache.counts, cache.peaks = list(self.empty.counts), list(self.empty.peaks)
        return cache

    def begin(self, cache: KVCache, tokens: Tensor | None = None) -> None:
        """Go on from the prompts that the cache has read, with these tokens `[B]` where they are known."""
        self.state.continue_from(cache)
        self.taken = self.launched
        if tokens is not None:
            self.tokens.copy_(tokens)
            self.history[self.launched % len(self.history)] = tokens
            self._fetch()
        self.turn.fill_(self.launched)

    def launch(self) -> None:
        """Begin a step with the tokens the last one left."""
        self.run()
        self._fetch()

    def _fetch(self) -> None:
        """Have the tokens of the latest step copied to the host, beside the steps that follow."""
        slot = self.launched % len(self.history)
        self.launched += 1
        if self.device.type != "cuda":
            self.seen[slot] = self.history[slot]
            return
        self.ran.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.beside):
            self.beside.wait_event(self.ran)
            self.seen[slot].copy_(self.history[slot], non_blocking=True)
            self.copied[slot].record(self.beside)

    def read(self) -> list[int]:
        """The tokens of the earliest step not read yet, waiting for them."""
        slot = self.taken % len(self.history)
        self.taken += 1
        if self.device.type == "cuda":
            self.copied[slot].synchronize()
        return self.seen[slot].tolist()

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token a row; the logits `[B, vocab]` after it, which hold until the next step."""
        self.tokens.copy_(torch.tensor(tokens))
        logits = self.run()
        self.launched += 1
        if self.device.type == "cuda":
            self.ran.record(torch.cuda.current_stream(self.device))
        return logits


def captured(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The body as a CUDA graph, whose result is in the same tensor each time. It runs twice before that."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # On a stream of this device and this thread, whose neighbors may go on with their own work meanwhile.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = body()

    def run() -> Tensor:
        graph.replay()
        return result

    return run


def why_not(model: Transformer) -> str | None:
    """Why the steps of a model wait for the host; None where they follow each other on the device.

    >>> from phasor import preset
    >>> why_not(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)))
    'the model is not on a GPU'
    """
    stopped = form_why_not(model)
    if stopped is not None:
        return stopped
    if not model.tokens.weight.is_cuda:
        forced = dispatch.forced_path() == "triton" and fused_step.why_not(model) is None
        return None if forced else "the model is not on a GPU"
    return "autocast is on, and casts weights at every step" if torch.is_autocast_enabled("cuda") else None


def form_why_not(model: Transformer) -> str | None:
    """The same, wherever the model is."""
    weights, modules = tensors_of(model), list(model.modules())
    if dispatch.forced_path() == "reference":
        return "the reference path is forced"
    if type(model) is not Transformer:
        return "the model has a class of its own"
    if model.config.shape != "decoder":
        return "an encoder-decoder's step depends on its source"
    if not can_compile(model):
        return "frequencies depend on the length, and are made on the host"
    if any(isinstance(part, Experts) for part in modules):
        return "a mixture of experts may have to wait for its router"
    if any(part._forward_hooks or part._forward_pre_hooks for part in modules):
        return "a part of the model has hooks, which run on the host"
    if any("forward" in vars(part) for part in modules):
        return "the forward of a part was replaced, and may need the host"
    if any(type(w) not in (nn.Parameter, Tensor) for w in weights) or len({w.device for w in weights}) > 1:
        return "the weights are not plain tensors on one device"
    return None


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All that a step reads of a model: weights, and those in 8 bits, which are buffers."""
    return [*model.parameters(), *model.buffers()]


# The latest steps of each model, for its next text; without what refers to the model, so that it can go.
KEPT: WeakKeyDictionary[Transformer, tuple[Any, Steps]] = WeakKeyDictionary()


@contextmanager
def steps_of(model: Transformer, rows: int, room: int, compiles: bool) -> Iterator[Steps]:
    """Steps for so many rows of so many tokens: those kept from the last text where they fit, or new ones.

    Whoever takes them has them alone; another text that begins meanwhile gets others.
    """
    weights = tuple((w.data_ptr(), w.dtype, w.shape) for w in tensors_of(model))
    key = rows, room, compiles, fused_step.why_not(model), weights, tuple(map(id, model.modules()))
    kept = KEPT.pop(model, None)
    steps = kept[1] if kept is not None and kept[0] == key else None
    del kept  # the memory of steps that do not fit goes before new ones are made
    if steps is None:
        steps = Steps(model, rows, room, compiles)
    try:
        yield steps
    finally:
        KEPT[model] = key, steps
