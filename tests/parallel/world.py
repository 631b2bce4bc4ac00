"""One of several processes that run many cases in one start; the results of the first are written as a file.

python world.py SIZE RESULTS CASES
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch._dynamo  # what optimizers import: once, before the processes are forked
import torch.distributed as dist
from parallel_cases import PackedBatches, config, recipe
from safetensors.torch import save_file
from world_processes import fork_processes

from phasor.config.recipe import MeshConfig
from phasor.data.prefetch import StepBatches
from phasor.nn.attention.base import Attention
from phasor.parallel.fresh import fresh_weights
from phasor.parallel.processes import Processes, join_processes
from phasor.training.sharded import ShardedTrainer
from phasor.training.signals import SharedStopSignal
from phasor.transformer import Transformer


def train_case(
    processes: Processes, results: Path, name: str, *, model_name: str, mesh: dict, steps: int, train: dict
) -> dict:
    """Losses, the first gradients and the validation loss of a model on a mesh."""
    given = recipe(**train)
    with torch.device("meta"):
        outline = Transformer(config(model_name))
    weights = fresh_weights(outline.config, 0)
    trainer = ShardedTrainer(outline, given, steps, processes, SharedStopSignal(), weights)
    batches = StepBatches(
        PackedBatches(model_name),
        accumulation_steps=given.train.gradient_accumulation_steps,
        workers=0,
        device="cpu",
        share=processes.share,
    )
    gathered = []
    attention = next(module for module in trainer.model.modules() if isinstance(module, Attention))
    hook = attention.register_forward_pre_hook(lambda module, _: gathered.append(str(module.out.weight.dtype)))
    first = trainer.train_step(0, *batches.take(0)).result()
    hook.remove()
    gradients = {}
    for weight, part in trainer.shards.parts.items():
        if part.grad is not None:
            gradients[weight] = trainer.shards.gather(weight, part.grad).contiguous()
    losses = [first, *(trainer.train_step(step, *batches.take(step)).result() for step in range(1, steps))]
    validation = trainer.validation_loss([PackedBatches(model_name)[i] for i in (7, 8)], lambda: False)
    held = {"weights": sum(part.numel() for part in trainer.shards.parts.values())}
    held["moments"] = sum(
        state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in trainer.optimizer.state.values()
    )
    held["gradients"] = sum(part.grad.numel() for part in trainer.shards.parts.values() if part.grad is not None)
    counts = torch.tensor(list(held.values()))
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    if processes.is_first:
        save_file(gradients, results / f"{name}.safetensors")
    return {
        "losses": [result.loss for result in losses],
        "norms": [result.grad_norm for result in losses],
        "validation": validation,
        "gathered": gathered[0],
        "most": dict(zip(held, counts.tolist(), strict=True)),
    }


def run_cases(results: Path, cases: dict) -> None:
    """Run all cases; those of one mesh follow each other, so that the processes meet once for them."""
    torch.set_num_threads(1)
    torch.compile = partial(torch.compile, backend="aot_eager")  # the same graphs, without minutes of C++
    found = {}
    for mesh, group in groupby(cases.items(), key=lambda case: case[1]["mesh"]):
        with join_processes(MeshConfig(**mesh), "cpu") as processes:
            found |= {name: train_case(processes, results, name, **case) for name, case in group}
    (results / f"results-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    size, results, cases = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    sys.exit(fork_processes(size, lambda: run_cases(results, cases)))
