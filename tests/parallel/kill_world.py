"""Processes that train until some of them are killed, after the fourth step or in the middle of its checkpoint.

    python kill_world.py SIZE RECIPE AT RANK ...

`RECIPE` is a JSON file, `AT` is "step" or "save". The others end by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from world_processes import fork_processes

from phasor.config.recipe import Recipe
from phasor.parallel.shards import Shards
from phasor.torchrun import read_launch
from phasor.training import train
from phasor.training.sharded import ShardedTrainer

LAST, WEIGHTS = 4, 7  # the step, and how many tensors of its checkpoint are put together


def train_and_die(recipe: Path, at: str, ranks: list[int]) -> None:
    torch.set_num_threads(1)
    dies, gathered = read_launch().rank in ranks, [None]
    save, gather, train_step = ShardedTrainer.save, Shards.gather, ShardedTrainer.train_step

    def count_saved(self, folder, step, values):
        gathered[0] = 0 if step == LAST else None
        save(self, folder, step, values)

    def gather_or_die(self, name, part):
        if gathered[0] is not None:
            gathered[0] += 1
        if dies and at == "save" and gathered[0] == WEIGHTS:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, name, part)

    def step_or_die(self, step, *given):
        if dies and at == "step" and step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, step, *given)

    ShardedTrainer.save, Shards.gather, ShardedTrainer.train_step = count_saved, gather_or_die, step_or_die
    train(Recipe.from_dict(json.loads(recipe.read_text())))


if __name__ == "__main__":
    size, recipe, at, ranks = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], [int(rank) for rank in sys.argv[4:]]
    sys.exit(fork_processes(size, lambda: train_and_die(recipe, at, ranks)))
