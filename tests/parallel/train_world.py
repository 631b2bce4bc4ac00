"""Runs of `phasor.train` by several processes, one after another in one start.

    python train_world.py SIZE RUNS

`RUNS` is a JSON list of runs: the recipe, whether to resume, how the run ends, and perhaps `stop_at`, the step after
which the last process gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # what optimizers import: once, before the processes are forked
from world_processes import fork_processes

from phasor.config.recipe import Recipe
from phasor.torchrun import read_launch
from phasor.training import train
from phasor.training.loop import TrainingLoop


def run_all(runs: list[dict]) -> None:
    torch.set_num_threads(1)
    rank = read_launch().rank
    train_step, stop_at = TrainingLoop.train_step, [None]

    def train_and_stop(self, batches):
        if self.step + 1 == stop_at[0] and rank == read_launch().size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(self, batches)

    TrainingLoop.train_step = train_and_stop
    for run in runs:
        stop_at[0] = run.get("stop_at")
        result = train(Recipe.from_dict(run["recipe"]), run["resume"])
        assert result.status == run["status"], result
        assert result.exit_code == (143 if result.status == "interrupted" else 0)


if __name__ == "__main__":
    sys.exit(fork_processes(int(sys.argv[1]), lambda: run_all(json.loads(Path(sys.argv[2]).read_text()))))
