"""The CUDA-graph step runner: steps follow each other on the device, each one replay of a graph.

Each step writes its likeliest tokens where the next one reads them. For greedy decoding the host launches steps
ahead and reads their tokens as they arrive, so the device never waits for the host.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from phasor.generation.runners import compiled
from phasor.generation.runners.eager import prefill
from phasor.generation.runners.protocol import StepSpec, round_length
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.static import StaticKVCache
from phasor.kv_cache.static_paged import StaticPagedKVCache
from phasor.nn.lora_hook import adapters_of, has_other_hooks
from phasor.nn.moe import Experts
from phasor.nn.positions.base import Position
from phasor.ops import dispatch
from phasor.ops.constants import cached_constants
from phasor.transformer import Stack, Transformer

CAPTURING = threading.Lock()  # torch captures one graph at a time
MAX_RETAINED_SHARE = 8  # graphs are retained for the next requests where they take at most 1/8 of a device
LOOKAHEAD = 8  # steps launched before the tokens of the first of them are read


class AsyncSteps(Protocol):
    """Steps that need no host: `launch` starts another, `read` waits for the tokens of the earliest unread one."""

    def launch(self) -> None: ...

    def read(self) -> list[int]: ...


def run_async(steps: AsyncSteps, max_steps: int | None) -> Iterator[list[int]]:
    """The tokens of one step after the other, `max_steps` of them or without end; the first is launched already."""
    launched, read = 1, 0
    while max_steps is None or read < max_steps:
        while launched <= read + LOOKAHEAD and (max_steps is None or launched < max_steps):
            steps.launch()
            launched += 1
        yield steps.read()
        read += 1


class StepBuffers:
    """The tensors that steps share: the static cache, the tokens of the next step, and those of the latest steps."""

    def __init__(self, cache: StaticKVCache | StaticPagedKVCache) -> None:
        self.cache = cache
        self.tokens = torch.zeros_like(cache.counts)
        self.history = self.tokens.new_zeros(LOOKAHEAD + 2, len(self.tokens))  # tokens by step, in a ring
        self.step_index = self.tokens.new_zeros(1)  # of the next entry in the history
        self.order = torch.arange(len(self.tokens), device=self.tokens.device)  # the rows that beams continue from

    def store_argmax(self, logits: Tensor) -> None:
        """Make the likeliest tokens those of the next step, and add them to the history."""
        self.tokens.copy_(logits.argmax(-1))
        self.history.index_copy_(0, self.step_index % len(self.history), self.tokens[None])
        self.step_index += 1


class CudaGraphRunner:
    """A cache and the step over it as a CUDA graph, reused for all requests of similar length.

    Over the pages of another cache there are steps alone, no prompts. On the CPU, which tests use, the step runs
    without a graph.
    """

    has_fixed_rows = True

    def __init__(self, spec: StepSpec) -> None:
        model = spec.model
        self.model = weakref.ref(model)
        self.device = model.tokens.weight.device
        self.lengths, self.nbytes = spec.lengths, graph_bytes(spec)
        self.buffers = StepBuffers(self._build_cache(spec) if spec.pages is None else spec.pages)
        self.launched = self.num_read = 0
        on_gpu = self.device.type == "cuda"
        self.host_history = torch.zeros(self.buffers.history.shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        body = self.with_reorder(self.build_step(model, spec.compile), spec.beams)
        body = body if spec.pages is None else self.with_tokens_of_rows(body, spec.pages)
        if on_gpu:
            self.copy_stream, self.step_done = torch.cuda.Stream(self.device), torch.cuda.Event()
            self.copied = [torch.cuda.Event() for _ in self.host_history]
            with CAPTURING, torch.cuda.device(self.device):
                self.compile_kernels(body)
                self.run = capture(body)
            self.constants = cached_constants()  # the graph reads them but does not keep them alive
        else:
            self.run = body

    def _build_cache(self, spec: StepSpec) -> StaticKVCache:
        self.empty_cache = spec.model.new_cache(spec.rows, round_length(spec.max_length))
        source_length = None if spec.model.encoder is None else round_source(spec.source_length)
        return StaticKVCache(self.empty_cache, source_length=source_length, length=planned_length(spec))

    def build_step(self, model: Transformer, compile: bool) -> Callable[[], Tensor]:
        """One step on the buffers."""
        buffers, step = self.buffers, compiled.compiled_step(model) if compile else compiled.static_step

        def run_step() -> Tensor:
            logits = step(model, buffers.cache, buffers.tokens)
            buffers.store_argmax(logits)
            return logits

        return run_step

    def compile_kernels(self, step: Callable[[], Tensor]) -> None:
        """Compile what a step launches, where that can be done before the first one."""

    def with_reorder(self, step: Callable[[], Tensor], beams: int) -> Callable[[], Tensor]:
        """The step after the rows of its cache have been reordered, where they are beams."""
        if beams == 1:
            return step
        cache, order = cast(StaticKVCache, self.buffers.cache), self.buffers.order

        def run_reordered_step() -> Tensor:
            cache.reorder(order, beams)
            return step()

        return run_reordered_step

    def with_tokens_of_rows(self, step: Callable[[], Tensor], pages: StaticPagedKVCache) -> Callable[[], Tensor]:
        """The step between the tokens of rows that come and go, and those that are chosen for them."""

        def run_step_of_rows() -> Tensor:
            pages.take_tokens(self.buffers.tokens)
            logits = step()
            pages.keep_tokens(self.buffers.tokens, logits)
            return logits

        return run_step_of_rows

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        self.buffers.order.copy_(torch.as_tensor(rows))

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        memory: EncoderOutput | None = None,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        model = self.model()
        assert model is not None
        cache = self._new_cache()
        logits = prefill(model, cache, prompts, memory, positions)
        cast(StaticKVCache, self.buffers.cache).continue_from(cache)
        self.num_read = self.launched
        self.buffers.step_index.fill_(self.launched)
        return logits

    def _new_cache(self) -> KVCache:
        """The cache with nothing in it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self.step_done)  # steps of the last request
        for tensors in (*self.empty_cache.layers, *self.empty_cache.states):
            for x in tensors.values():
                x.zero_()
        cache = copy.copy(self.empty_cache)
        cache.counts, cache.peaks = list(self.empty_cache.counts), list(self.empty_cache.peaks)
        cache.lengths = cache.lengths if self.lengths is None else list(self.lengths)
        return cache

    def start(self, tokens: Tensor) -> None:
        """Give the first new tokens `[B]`, from which `launch` goes on."""
        self.buffers.tokens.copy_(tokens)
        self.buffers.history[self.launched % len(self.host_history)] = tokens
        self._copy_to_host()
        self.buffers.step_index.fill_(self.launched)

    def launch(self) -> None:
        """Start a step with the tokens of the last one."""
        self.run()
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        """Start copying the tokens of the latest step to the host, concurrently with the steps that follow."""
        slot = self.launched % len(self.host_history)
        self.launched += 1
        if self.device.type != "cuda":
            self.host_history[slot] = self.buffers.history[slot]
            return
        self.step_done.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(self.step_done)
            self.host_history[slot].copy_(self.buffers.history[slot], non_blocking=True)
            self.copied[slot].record(self.copy_stream)

    def read(self) -> list[int]:
        """Wait for the tokens of the earliest step not read yet."""
        slot = self.num_read % len(self.host_history)
        self.num_read += 1
        if self.device.type == "cuda":
            self.copied[slot].synchronize()
        return self.host_history[slot].tolist()

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        self.buffers.tokens.copy_(torch.as_tensor(tokens))
        logits = self.run()
        self.launched += 1
        if self.device.type == "cuda":
            self.step_done.record(torch.cuda.current_stream(self.device))
        return logits


def capture(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The body as a CUDA graph, whose result is in the same tensor each time. It is run twice before the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # On a stream of this device, for this thread alone: others may use CUDA meanwhile.
    with (
        no_garbage_collection(),
        restored_state(),
        torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
    ):
        result = body()

    def run() -> Tensor:
        graph.replay()
        return result

    return run


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection by the way: where it frees another graph or memory of the host, the capture fails."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def restored_state() -> Iterator[None]:
    """After a capture that failed: torch leaves its stream the current one, and random numbers in a capture."""
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise


def graph_step_why_not(model: Transformer, weight: Tensor | None = None) -> str | None:
    """Why the steps of a model are no CUDA graph; None where they are.

    >>> from phasor import preset
    >>> graph_step_why_not(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)))
    'the model is not on a GPU'
    """
    weight = model.tokens.weight if weight is None else weight
    if (reason := model_why_not(model)) is not None:
        return reason
    return autocast_why_not(weight) if weight.is_cuda else "the model is not on a GPU"


def spec_why_not(spec: StepSpec) -> str | None:
    """Why the steps of this number of rows and these lengths are no CUDA graph."""
    return experts_why_not(spec) or length_why_not(spec)


def experts_why_not(spec: StepSpec) -> str | None:
    """Why steps with a mixture of experts are no CUDA graph."""
    experts = (part for part in spec.model.modules() if isinstance(part, Experts))
    if any(part.waits_for_router(spec.rows, spec.weight.device) for part in experts):
        return f"the experts of {spec.rows} rows are grouped on the host"
    return None


def length_why_not(spec: StepSpec) -> str | None:
    """Why steps over pages of sources, and those whose frequencies depend on the length, are no CUDA graph."""
    if spec.pages is not None:
        if spec.model.encoder is not None:
            return "sources of rows that come and go are of any length"
        return compiled.compiled_step_why_not(spec.model)
    if len({frequency_tables(spec.model, length) for length in set(row_lengths(spec))}) > 1:
        return "rows are planned for different lengths, which frequencies depend on"
    return compiled.compiled_step_why_not(spec.model) if spec.compile else None


def row_lengths(spec: StepSpec) -> Sequence[int]:
    """The planned lengths of the rows."""
    return [spec.max_length] if spec.lengths is None else spec.lengths


def planned_length(spec: StepSpec) -> int | None:
    """A length with the frequencies of all rows, where they depend on it."""
    return row_lengths(spec)[0] if cast(Stack, spec.model.decoder).needs_length else None


def frequency_tables(model: Transformer, length: int) -> tuple[Any, ...]:
    """What a graph has of a planned length: the frequencies of the schemes that depend on it, or the length itself."""
    return tuple(cast(Position, module).length_key(length) for module in cast(Stack, model.decoder).positions)


def graph_bytes(spec: StepSpec) -> int:
    """Bytes that a graph holds: keys and values, an encoder's included, and logits.

    >>> from phasor import preset
    >>> graph_bytes(StepSpec(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)), rows=3))
    98904
    """
    model, dtype = spec.model, spec.model.tokens.dtype
    cache = KVCache(model.config, spec.rows, round_length(spec.max_length), device="meta", dtype=dtype)
    if model.encoder is not None:
        cache.cross = cache.new_cross(round_source(spec.source_length))
    return cache.nbytes + spec.rows * model.config.vocab_size * dtype.itemsize


def max_retained_bytes(device: torch.device) -> int:
    """The most that the retained graphs of a model may take together.

    >>> max_retained_bytes(torch.device("cpu")) >= 2**40
    True
    """
    if device.type != "cuda":
        return 1 << 62
    return int(torch.cuda.get_device_properties(device).total_memory) // MAX_RETAINED_SHARE


def round_source(length: int) -> int:
    """A source length rounded up to a power of two, so that similar lengths share a graph.

    >>> round_source(3), round_source(40)
    (16, 64)
    """
    return max(16, 1 << (length - 1).bit_length())


def autocast_why_not(weight: Tensor) -> str | None:
    """Why steps under autocast are no CUDA graph."""
    on = weight.is_cuda and torch.is_autocast_enabled("cuda")
    return "autocast is on, and casts weights at every step" if on else None


def model_why_not(model: Transformer) -> str | None:
    """Why the steps of a model could be no CUDA graph on any device."""
    modules = list(model.modules())
    weights = step_tensors(modules)
    if dispatch.forced_path() == "reference":
        return "the reference path is forced"
    if type(model) is not Transformer:
        return "the model is of a subclass"
    if any(has_other_hooks(part) for part in modules):
        return "a part of the model has hooks, which run on the host"
    if any("forward" in vars(part) for part in modules):
        return "the forward of a part was replaced, and may need the host"
    if any(type(w) not in (nn.Parameter, Tensor) for w in weights) or len({w.device for w in weights}) > 1:
        return "the weights are not plain tensors on one device"
    return None


def step_tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """All tensors of a model's modules that a step reads: weights, and those in int8, which are buffers."""
    held = (x for part in modules for tensors in (part._parameters, part._buffers) for x in tensors.values())
    return list({id(x): x for x in held if x is not None}.values())


def model_identity(model: Transformer) -> Any:
    """The weights and modules that a captured graph depends on."""
    modules = list(model.modules())
    weights = tuple((w.data_ptr(), w.dtype, w.shape) for w in step_tensors(modules))
    strengths = tuple(lora.strength for module in modules for lora in adapters_of(module).values())
    return weights, tuple(map(id, modules)), strengths


def sizes_identity(spec: StepSpec) -> Any:
    """All else that it depends on: where both are equal, the graph can be used again."""
    source = 0 if spec.model.encoder is None else round_source(spec.source_length)
    sizes = spec.rows, spec.beams, round_length(spec.max_length), source, spec.compile
    return sizes, frequency_tables(spec.model, row_lengths(spec)[0])
