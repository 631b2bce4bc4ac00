"""The memory that `phasor plan` states beside that of real training steps, by mesh and activation checkpointing.

A process for each mesh is its first one under torch's fake process group, whose exchanges move nothing: it builds the
model as training does, takes a few of training's own steps on random tokens, and reads the allocator. What it gathers
is not what others would send, so losses and gradients mean nothing; where one is not finite, the optimizer's kernel
runs and writes nothing. Fails where the plan is off by more than 10 % in one of:

- weights: allocated once the model is built
- gradients, moments: allocated after a step, with gradients and without
- the rest: what the peak is above weights and moments: activations, buffers, and gradients where they meet
- peak: the most that is allocated in a step

    python benchmarks/plan_memory.py [--mesh tensor=4,shard=2 ...] [--param-dtype bfloat16] [--out FILE.json]
    python benchmarks/plan_memory.py --device cpu  # a trial of a small model, by the bytes of live tensors

Results of an H200: results/plan-memory.json, and with --param-dtype bfloat16 results/plan-memory-bfloat16.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import phasor
from phasor.config.recipe import MeshConfig, Recipe
from phasor.data.batch import Batch
from phasor.parallel import plan
from phasor.parallel.fresh import fresh_weights
from phasor.parallel.memory import WORKSPACES
from phasor.parallel.mesh import Mesh, parse_axes
from phasor.parallel.processes import JoinedProcesses
from phasor.torchrun import Launch
from phasor.training.sharded import ShardedTrainer
from phasor.training.signals import SharedStopSignal
from phasor.training.trainer import Trainer

MESHES = (
    *("shard=1", "shard=8", "replicate=2,shard=4", "tensor=4,shard=2"),
    *("context=2,shard=4", "tensor=2,context=2,shard=2"),
)
LARGE = {"dim": 2048, "hidden_dim": 8192, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000}
SMALL = {"dim": 128, "hidden_dim": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 500}
STEPS, ALLOWED = 3, 0.1
PHASES = ("forward", "backward", "optimizer")
KINDS = ("weights", "gradients", "moments", "the rest", "peak")


class CudaMeter:
    """Bytes of the GPU's allocator."""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def now(self) -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The most since this was asked last."""
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found


class LiveMeter(TorchDispatchMode):
    """The same for a CPU: bytes of the tensors that operations inside have given out and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.most = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.storages[(x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()] = None
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        return sum(storage.nbytes() for storage in self.storages if storage.device.type != "meta")

    def peak(self) -> int:
        found, self.most = self.most, self.now()
        return found


Meter = CudaMeter | LiveMeter


class Phases:
    """The peaks of a trainer's steps by phase, and what is allocated when the backward pass begins."""

    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self.meter, self.found = meter, dict.fromkeys((*PHASES, "kept"), 0)
        self.clip, trainer.clip_gradients = trainer.clip_gradients, self.clip_gradients

    def end(self, phase: str) -> None:
        self.found[phase] = max(self.found[phase], self.meter.peak())

    def clip_gradients(self, stats: torch.Tensor) -> None:
        self.end("backward")
        self.clip(stats)

    def step(self, take: Callable[[], Any]) -> Any:
        """What a step gives, watched."""
        backward = torch.Tensor.backward

        def note_and_call(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            self.end("forward")
            self.found["kept"] = max(self.found["kept"], self.meter.now())
            backward(loss, *args, **options)

        torch.Tensor.backward = note_and_call
        try:
            result = take()
        finally:
            torch.Tensor.backward = backward
        self.end("optimizer")
        return result


def model_config(given: argparse.Namespace) -> phasor.ModelConfig:
    return phasor.preset("llama-2", **(LARGE if given.device == "cuda" else SMALL), max_length=given.length)


def recipe_of(given: argparse.Namespace, checkpointing: bool) -> Recipe:
    fields = {"precision": "bfloat16", "param_dtype": given.param_dtype, "device": given.device}
    fields |= {"activation_checkpointing": checkpointing, "compile": given.compile}
    return Recipe.from_dict({"train": fields, "schedule": {"kind": "constant", "warmup": 0}})


def repeated_weights(config: phasor.ModelConfig, model: phasor.Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Fresh weights of one block for all blocks: to draw those of each takes long, and no memory depends on them."""
    drawn = dict(fresh_weights(config.replace(num_layers=1), seed=0))
    names = [name for name, _ in model.named_parameters()]
    return ((name, drawn[re.sub(r"\.blocks\.\d+\.", ".blocks.0.", name)]) for name in names)


def build_trainer(given: argparse.Namespace, processes: JoinedProcesses | None, checkpointing: bool) -> Trainer:
    """The trainer of this process, built as `phasor train` builds it."""
    config, recipe = model_config(given), recipe_of(given, checkpointing)
    with torch.device(given.device if processes is None else "meta"):
        model = phasor.Transformer(config)
    if processes is None:
        return Trainer(model, recipe, STEPS)
    weights = repeated_weights(config, model)
    return ShardedTrainer(model, recipe, STEPS, processes, SharedStopSignal(), weights)


@contextmanager
def first_of(given: argparse.Namespace, size: int, axes: dict[str, int]) -> Iterator[JoinedProcesses]:
    """The first of some processes that do not exist."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    processes = JoinedProcesses(Launch(rank=0, size=size, local_rank=0, restarts=0), dist.HashStore())
    try:
        processes.start(MeshConfig(**axes), given.device, backend="fake")
        yield processes
    finally:
        processes.done.set()
        processes.watcher.join()
    dist.destroy_process_group()


def drawn_batches(given: argparse.Namespace, vocabulary: int, groups: int) -> list[Batch]:
    """The rows of this process in a step."""
    shape = (given.rows, given.length)
    return [
        Batch(
            tokens=torch.randint(vocabulary, shape, device=given.device),
            targets=torch.randint(vocabulary, shape, device=given.device),
            weights=torch.ones(shape, device=given.device),
            whole_count=float(given.rows * given.length * groups),
        )
        for _ in range(given.accumulation)
    ]


def measure(
    given: argparse.Namespace, processes: JoinedProcesses | None, groups: int, checkpointing: bool
) -> dict[str, Any]:
    """Bytes by kind, as they are allocated."""
    gc.collect()
    meter: Meter = CudaMeter() if given.device == "cuda" else LiveMeter()
    with meter:
        batches = drawn_batches(given, model_config(given).vocab_size, groups)
        count = float(given.rows * given.length * groups * given.accumulation)
        before = meter.now()
        trainer = build_trainer(given, processes, checkpointing)
        gc.collect()
        weights = meter.now() - before
        trainer.train_step(0, batches, count).result()
        with_gradients = meter.now()
        for part in (*trainer.model.parameters(), *trainer.weights.parameters()):
            part.grad = None
        states = meter.now()
        phases = Phases(trainer, meter)
        meter.peak()
        results = [
            phases.step(lambda step=step: trainer.train_step(step, batches, count).result()) for step in range(1, STEPS)
        ]
    peak = max(phases.found.values()) - before
    return {
        "weights": weights,
        "gradients": with_gradients - states,
        "moments": states - weights - before,
        "the rest": peak - (states - before),
        "peak": peak,
        "phases": {phase: found - before for phase, found in phases.found.items()},
        "finite": all(not result.not_finite for result in results),
    }


def plan_figures(given: argparse.Namespace, mesh: Mesh, checkpointing: bool) -> dict[str, Any]:
    """The same as the plan has it."""
    found = plan(
        model_config(given),
        devices=mesh.devices,
        context=given.length,
        mesh=mesh,
        rows=given.rows,
        batch_tokens=given.rows * given.length * mesh.data * given.accumulation,
        activation_checkpointing=checkpointing,
        param_dtype=given.param_dtype,
    )
    memory = found.memory
    peak = memory.peak - (0 if given.device == "cuda" else WORKSPACES)  # of a GPU's matrix products
    assert (found.rows, found.accumulation) == (given.rows, given.accumulation)
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "moments": memory.moments,
        "the rest": peak - memory.weights - memory.moments,
        "peak": peak,
        "activations": memory.activations,
        "buffers": memory.buffers,
    }


def mesh_of(text: str) -> tuple[Mesh, dict[str, int]]:
    """A mesh, and the axes that name it."""
    axes = parse_axes(text)
    return Mesh(**axes), axes


def run_mesh(given: argparse.Namespace, text: str) -> None:
    """Print what one mesh takes, as JSON: the part of a process of its own."""
    mesh, axes = mesh_of(text)
    torch.manual_seed(0)
    with first_of(given, mesh.devices, axes) if mesh.devices > 1 else nullcontext() as processes:
        for checkpointing in (False, True):
            found = measure(given, processes, mesh.data, checkpointing)
            about = {"mesh": text, "activation_checkpointing": checkpointing}
            print(
                json.dumps(about | {"measured": found, "planned": plan_figures(given, mesh, checkpointing)}), flush=True
            )


def compare(case: dict[str, Any], unit: tuple[int, str]) -> bool:
    """Print a case, and say whether the plan is within what is allowed."""
    size, name = unit
    measured, stated = case["measured"], case["planned"]
    case["off"] = {kind: stated[kind] / measured[kind] - 1 for kind in KINDS}
    right = {kind: abs(off) <= ALLOWED for kind, off in case["off"].items()}
    print(f"{case['mesh']}, {'with' if case['activation_checkpointing'] else 'without'} activation checkpointing")
    for kind in KINDS:
        said = f"  {kind:12} measured {measured[kind] / size:8.3f} {name}   planned {stated[kind] / size:8.3f} {name}"
        print(f"{said}   {case['off'][kind]:+7.1%}   {'within 10 %' if right[kind] else 'OFF'}")
    phases = ", ".join(f"{phase} {measured['phases'][phase] / size:.3f}" for phase in PHASES)
    print(f"  peaks: {phases}; before the backward pass {measured['phases']['kept'] / size:.3f} {name}")
    parts = ", ".join(f"{kind} {stated[kind] / size:.3f}" for kind in ("activations", "buffers"))
    print(f"  planned: {parts} {name}", flush=True)
    return all(right.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--mesh", nargs="+", default=list(MESHES), help="axes such as tensor=4,shard=2")
    options.add_argument("--length", type=int, help="tokens of a row: 8192, or 512 on a CPU")
    options.add_argument("--rows", type=int, default=1, help="rows at once on each group of devices")
    options.add_argument("--accumulation", type=int, default=1, help="backward passes of a step")
    options.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--compile", action="store_true", help="with compiled blocks")
    options.add_argument("--out", type=Path, help="a JSON file for the results")
    options.add_argument("--only", help=argparse.SUPPRESS)
    given = options.parse_args()
    given.length = given.length or (8192 if given.device == "cuda" else 512)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --device cpu tries it with a small model")
    if given.only:
        run_mesh(given, given.only)
        return
    unit = (2**30, "GiB") if given.device == "cuda" else (2**20, "MiB")
    cases: list[dict[str, Any]] = []
    right = []
    for mesh in given.mesh:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", mesh]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        if child.returncode:
            print(f"{mesh}: the process ended with {child.returncode}", flush=True)
        right += [compare(case, unit) for case in found] + [child.returncode == 0]
        cases += found
    if given.out is not None:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        size = {key: getattr(given, key) for key in ("length", "rows", "accumulation", "param_dtype", "compile")}
        about = {"device": name, "torch": torch.__version__, "model": LARGE if given.device == "cuda" else SMALL}
        given.out.write_text(json.dumps(about | size | {"cases": cases}, indent=1) + "\n")
    peaks = [abs(case["off"]["peak"]) for case in cases]
    print(f"{sum(off <= ALLOWED for off in peaks)} of {len(peaks)} peaks are within 10 %", flush=True)
    if given.device == "cpu":
        print("a trial: operations on a CPU keep other tensors than those on a GPU")
    raise SystemExit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
