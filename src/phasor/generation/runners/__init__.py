"""Step runners: the ways to run the model on one token per row, fastest first, and how one is chosen.

`STEP_RUNNERS` is the table of them; `step_runner` takes a runner from it, or the one retained from the last request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from phasor.generation.runners import compiled, cuda_graph, fused
from phasor.generation.runners.compiled import CompiledRunner
from phasor.generation.runners.cuda_graph import CudaGraphRunner
from phasor.generation.runners.eager import EagerRunner
from phasor.generation.runners.fused import FusedRunner
from phasor.generation.runners.protocol import StepRunner, StepSpec
from phasor.ops.dispatch import Dispatch, Path
from phasor.transformer import Transformer


def fused_why_not(spec: StepSpec) -> str | None:
    model, weight = spec.model, spec.weight
    reason = cuda_graph.model_why_not(model) or fused.why_not(model, weight)
    return reason or cuda_graph.autocast_why_not(weight) or cuda_graph.spec_why_not(spec)


def cuda_graph_why_not(spec: StepSpec) -> str | None:
    return cuda_graph.why_not(spec.model, spec.weight) or cuda_graph.spec_why_not(spec)


def compiled_why_not(spec: StepSpec) -> str | None:
    return compiled.why_not(spec.model) if spec.compile else "only generate(compile=True) compiles steps"


FUSED = Path("fused kernels in one CUDA graph", FusedRunner, fused_why_not)
STEP_RUNNERS = Dispatch(
    FUSED,
    Path("CUDA graph", CudaGraphRunner, cuda_graph_why_not),
    Path("compiled graph", lambda spec: CompiledRunner(spec.model, spec.new_cache()), compiled_why_not),
    Path("eager", lambda spec: EagerRunner(spec.model, spec.new_cache())),
)


def runs_cuda_graph(spec: StepSpec) -> bool:
    """Whether steps are a CUDA graph, whose number of rows is fixed.

    >>> from phasor import preset
    >>> runs_cuda_graph(StepSpec(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))))
    False
    """
    return STEP_RUNNERS.choose(spec).run in (FusedRunner, CudaGraphRunner)


# The latest CUDA graph of each model, for its next request; it does not refer to the model, so that it can be freed.
RETAINED: WeakKeyDictionary[Transformer, tuple[Any, CudaGraphRunner]] = WeakKeyDictionary()


@contextmanager
def step_runner(spec: StepSpec) -> Iterator[StepRunner]:
    """A runner for a request: the retained CUDA graph where it fits, or a new runner.

    A request has its runner to itself; another one that starts meanwhile gets its own.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)).eval()
    >>> with step_runner(StepSpec(model)) as runner:
    ...     type(runner).__name__
    'EagerRunner'
    """
    path = STEP_RUNNERS.choose(spec)
    if path.run not in (FusedRunner, CudaGraphRunner):
        RETAINED.pop(spec.model, None)  # it may hold memory of a device that the model has left
        yield path.run(spec)
        return
    key = path.name, cuda_graph.identity(spec)
    retained = RETAINED.pop(spec.model, None)
    runner = retained[1] if retained is not None and retained[0] == key else None
    del retained  # a graph that does not fit frees its memory before a new one is captured
    if runner is None:
        runner = path.run(spec)
    runner.lengths = spec.lengths
    try:
        yield runner
    finally:
        if runner.nbytes <= cuda_graph.max_retained_bytes(runner.device):
            RETAINED[spec.model] = key, runner


__all__ = ["FUSED", "RETAINED", "STEP_RUNNERS", "StepRunner", "StepSpec", "runs_cuda_graph", "step_runner"]
