"""The compiled step runner: every step of one token per row is the same compiled graph.

All that changes from step to step is in the tensors of a static cache. So one graph serves all steps of a model with
caches of one size. Within a request even its inputs are the same tensors: after the first step the graph is called
directly, without the compiler's guards, which would check every module of the model again. That needs a step with no
Python around its graph, such as hooks, and a model that does not change during a request.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules import module as hooks

from phasor.generation.runners.eager import EagerRunner, last_logits
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.static import StaticKVCache
from phasor.kv_cache.static_paged import StaticPagedKVCache
from phasor.nn.lora_hook import has_other_hooks
from phasor.transformer import Stack, Transformer


def static_step(model: Transformer, cache: StaticKVCache | StaticPagedKVCache, tokens: Tensor) -> Tensor:
    """Feed one token per row `[B]`; the logits `[B, vocab]` after it."""
    return last_logits(model, model.decode(tokens[:, None], cache.memory, cache=cache))


class GraphCalls(threading.local):
    """The calls of compiled graphs in this thread, as functions that repeat them, and what they returned.

    None where nobody records them.
    """

    calls: list[tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]] | None = None


RECORDED = GraphCalls()


def recording_backend(
    graph: torch.fx.GraphModule, inputs: list[Tensor], compile_graph: Callable[..., Any] | None = None
) -> Callable[..., Sequence[Tensor]]:
    """The backend of compiled steps: Inductor unless another is given, with calls of the graph recorded on request."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = (compile_graph or cast(Callable[..., Any], compile_fx))(graph, inputs)

    def call(*args: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = compiled(*args)
        if RECORDED.calls is not None:
            RECORDED.calls.append((functools.partial(compiled, *args), outputs))
        return outputs

    return call


# The compiled steps of models that exist.
STEPS: WeakKeyDictionary[Transformer, Any] = WeakKeyDictionary()


def compiled_step(model: Transformer) -> Any:
    """The compiled step of a model, created on first use: importing the compiler takes a while.

    Dynamo compiles one code object a few times (`recompile_limit`) and runs it eagerly from then on. So every model
    has its own: no other model takes from its number.
    """
    if model not in STEPS:
        STEPS[model] = torch.compile(copy_function(static_step), dynamic=False, backend=recording_backend)
    return STEPS[model]


def copy_function(function: Callable[..., Tensor]) -> FunctionType:
    """A function that does the same, with its own code object."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__)


def call_step(model: Transformer, cache: StaticKVCache, tokens: Tensor) -> Tensor:
    """A compiled step, in a separate graph where the model has other hooks, which Dynamo does not check by itself."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        logits: Tensor = compiled_step(model)(model, cache, tokens)
    return logits


def record_step(model: Transformer, cache: StaticKVCache, tokens: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """The logits of a compiled step, and a function for further ones, with tokens and cache in the same tensors."""
    RECORDED.calls = []
    try:
        logits = call_step(model, cache, tokens)
        calls = RECORDED.calls
    finally:
        RECORDED.calls = None
    # There may be several graphs with Python between them, or none, and a graph may also return what hooks keep.
    if len(calls) != 1 or len(calls[0][1]) != 1 or calls[0][1][0] is not logits or runs_other_code(model):
        return logits, lambda: call_step(model, cache, tokens)
    repeat = calls[0][0]
    return logits, lambda: repeat()[0]


def runs_other_code(model: Transformer) -> bool:
    """Whether a model has hooks, or modules other than those of phasor and torch: not all of it may be in the graph.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> handle = model.head.register_forward_hook(print)
    >>> runs_other_code(model), handle.remove(), runs_other_code(model)
    (True, None, False)
    """
    return hooks._has_any_global_hook() or any(
        has_other_hooks(module)
        or "forward" in vars(module)
        or type(module).__module__.split(".")[0] not in ("phasor", "torch")
        for module in model.modules()
    )


class CompiledRunner(EagerRunner):
    """Prompts are read eagerly; from the first step on a static cache over the same memory takes over."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model, cache)
        self.tokens: Tensor | None = None
        self.repeat: Callable[[], Tensor] | None = None

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        column = torch.as_tensor(tokens, device=self.model.tokens.weight.device)
        if self.repeat is None or self.tokens is None:
            self.tokens = column.clone()  # later tokens are written there
            logits, self.repeat = record_step(self.model, StaticKVCache(self.cache), self.tokens)
            return logits
        self.tokens.copy_(column)
        return self.repeat()


def compiled_step_why_not(model: Transformer) -> str | None:
    """Why one graph does not serve all steps of a model; None where it does.

    >>> from phasor import preset
    >>> compiled_step_why_not(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))) is None
    True
    """
    if cast(Stack, model.decoder).needs_length:
        return "frequencies depend on the length and are computed on the host, another graph for each length"
    return None
