"""Step runners: the ways to run the model on one token per row, fastest first, and how one is chosen.

`STEP_RUNNERS` is the table of them; `step_runner` takes a runner from it, or one retained from an earlier request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

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
    reason = cuda_graph.model_why_not(model) or fused.fused_step_why_not(model, weight)
    if reason is None and spec.compile and fused.runs_modules(model):
        return "some sub-layers run as modules, which generate(compile=True) compiles"
    return reason or cuda_graph.autocast_why_not(weight) or cuda_graph.spec_why_not(spec)


def cuda_graph_why_not(spec: StepSpec) -> str | None:
    return cuda_graph.graph_step_why_not(spec.model, spec.weight) or cuda_graph.spec_why_not(spec)


def compiled_why_not(spec: StepSpec) -> str | None:
    return compiled.compiled_step_why_not(spec.model) if spec.compile else "only generate(compile=True) compiles steps"


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


def new_runner(spec: StepSpec) -> CudaGraphRunner:
    """A runner of steps that are a CUDA graph."""
    runner: CudaGraphRunner = STEP_RUNNERS.choose(spec).run(spec)
    return runner


class RetainedGraphs:
    """The CUDA graphs of a model's latest requests, for the next ones.

    They do not refer to the model, so that it can be freed. `model_identity` says which weights and modules they are
    for, `runners` has them by all else they depend on, the latest last.
    """

    def __init__(self, model_identity: Any) -> None:
        self.model_identity = model_identity
        self.runners: dict[Any, CudaGraphRunner] = {}

    @property
    def latest(self) -> CudaGraphRunner:
        return next(reversed(self.runners.values()))

    def make_room(self, nbytes: int, device: torch.device) -> None:
        """Free the graphs that were not used for longest, until one more of this size may be retained."""
        most = cuda_graph.max_retained_bytes(device) - nbytes
        while self.runners and (self.nbytes > most or len(self.runners) >= MAX_RETAINED):
            del self.runners[next(iter(self.runners))]

    @property
    def nbytes(self) -> int:
        return sum(runner.nbytes for runner in self.runners.values())


RETAINED: WeakKeyDictionary[Transformer, RetainedGraphs] = WeakKeyDictionary()
MAX_RETAINED = 8  # graphs of a model, of any size: each also has some memory for what it computes


@contextmanager
def step_runner(spec: StepSpec) -> Iterator[StepRunner]:
    """A runner for a request: a retained CUDA graph where one fits, or a new runner.

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
    key, retained = (path.name, cuda_graph.sizes_identity(spec)), retained_graphs(spec.model)
    runner = retained.runners.pop(key, None)
    if runner is None:
        retained.make_room(cuda_graph.graph_bytes(spec), spec.weight.device)  # before memory for another is taken
        runner = path.run(spec)
    runner.lengths = spec.lengths
    try:
        yield runner
    finally:
        if runner.nbytes <= cuda_graph.max_retained_bytes(runner.device):
            retained.make_room(runner.nbytes, runner.device)
            retained.runners[key] = runner


def retained_graphs(model: Transformer) -> RetainedGraphs:
    """The graphs that were captured for a model as it is; others are freed."""
    identity = cuda_graph.model_identity(model)
    if model not in RETAINED or RETAINED[model].model_identity != identity:
        RETAINED[model] = RetainedGraphs(identity)
    return RETAINED[model]


__all__ = ["FUSED", "RETAINED", "STEP_RUNNERS", "StepRunner", "StepSpec", "runs_cuda_graph", "step_runner"]
