"""How much memory each of several processes takes to load a model folder.

    python memory_world.py SIZE FOLDER RESULTS

A folder `small` beside it is loaded before. Each process writes to `RESULTS/RANK.json` the bytes of its parts of the
weights, and by how much its resident memory grew at most, as Linux counts it.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from world_processes import fork_processes

from phasor.config.recipe import MeshConfig
from phasor.parallel.load import load_shards
from phasor.parallel.processes import join_processes


def resident(field: str) -> int:
    """A count of /proc/self/status in bytes: VmRSS, or VmHWM, the most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def measure(folder: Path, results: Path) -> None:
    torch.set_num_threads(1)
    with join_processes(MeshConfig(), "cpu") as processes:
        load_shards(folder.with_name("small"), processes)  # which imports what is needed
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        model = load_shards(folder, processes)
        grown = resident("VmHWM") - before
        parts = [weight.to_local() for weight in model.parameters()]
        held = sum(part.untyped_storage().nbytes() for part in parts)
        (results / f"{processes.rank}.json").write_text(json.dumps({"held": held, "grown": grown}))


if __name__ == "__main__":
    sys.exit(fork_processes(int(sys.argv[1]), lambda: measure(Path(sys.argv[2]), Path(sys.argv[3]))))
