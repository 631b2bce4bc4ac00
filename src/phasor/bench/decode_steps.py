"""One decoding step over a full cache of random entries, by the runner that generation chooses."""

from __future__ import annotations

from typing import Any, cast

import torch

from phasor.bench.study import Study
from phasor.generation.runners import STEP_RUNNERS, StepSpec, runs_cuda_graph
from phasor.generation.runners.cuda_graph import CudaGraphRunner
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.moe import Experts
from phasor.transformer import Transformer

ROOM = 128  # tokens that are decoded while a step is timed


@torch.inference_mode()
def decode_step_row(study: Study, model: Transformer, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a step, tokens per second, and the share of the limit.

    The limit is to read weights in use and the cache once, and to write states, which all change, once too.
    """
    runner = graph_runner(study, StepSpec(model, rows=batch, max_length=context + ROOM))
    fill_cache(runner, context)
    ms = study.machine.timer.back_to_back_ms(runner.run)
    kept = [x for tensors in runner.buffers.cache.layers for x in tensors.values()]
    per_token = sum(x[0, 0].nbytes for x in kept)
    read = step_bytes(model, batch) + batch * sum(min(context, x.shape[1]) * x[0, 0].nbytes for x in kept)
    states = sum(x.nbytes for tensors in runner.buffers.cache.states for x in tensors.values())
    limit_ms = 1e3 / study.machine.bandwidth
    return {
        "runner": type(runner).__name__,
        "batch": batch,
        "context": context,
        "step_ms": ms,
        "tokens/s": 1e3 * batch / ms,
        "cache bytes per token": per_token,
        "of limit": limit_ms * (read + 2 * states) / ms,
    } | ({"state bytes per row": states // batch, "of reading": limit_ms * (read + states) / ms} if states else {})


def graph_runner(study: Study, spec: StepSpec) -> CudaGraphRunner:
    """The runner of a step as a CUDA graph; on a CPU that of plain steps, without a graph."""
    if not study.on_gpu:
        return CudaGraphRunner(spec)
    name, reasons = STEP_RUNNERS.explain(spec)
    if not runs_cuda_graph(spec):
        raise ValueError(f"steps are no CUDA graph but {name}: {reasons}")
    return cast(CudaGraphRunner, STEP_RUNNERS.choose(spec).run(spec))


def fill_cache(runner: CudaGraphRunner, context: int) -> None:
    """Let the cache of a runner hold as many random tokens as the context."""
    cache = cast(StaticKVCache, runner.buffers.cache)
    for tensors in (*cache.layers, *cache.states):
        for x in tensors.values():
            if x.is_floating_point():
                x.normal_()
    for table in cache.positions.values():
        table.copy_(torch.arange(table.shape[1], device=table.device))
    cache.counts.fill_(context)
    cache.next_positions.fill_(context)


def step_bytes(model: Transformer, batch: int) -> float:
    """Bytes of weights that a step reads: all but the table of tokens, of experts those that a batch chooses."""
    total = float(sum(w.nbytes for name, w in model.named_parameters() if name != "tokens.weight"))
    for part in model.modules():
        if isinstance(part, Experts):
            unused = (1 - part.experts.top_k / part.experts.num_experts) ** batch
            total -= unused * sum(w.nbytes for w in (part.up, part.down))
    return total
