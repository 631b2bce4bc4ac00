"""Tasks on two processes: losses are those of one, and a run that is stopped resumes in the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kill_points
import pytest
import torch
from safetensors.torch import load_file

from phasor.config.recipe import Recipe
from phasor.training import train
from phasor.training.progress import TrainingProgress

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
FULL = os.environ.get("PHASOR_EXAMPLES") == "full"
TASKS = ["chat", "adapter preference", "classify", "mixture", *(["preference", "embed", "distill"] if FULL else [])]
STOPPED = "adapter preference"


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


def fields(folder, task, name):
    """A tiny run of a task without dropout, whose masks are drawn by process."""
    of = "language" if task == "mixture" else task
    made = kill_points.recipe(of, folder, name, folder / "base").to_dict()
    made["model"] = {field: value for field, value in made["model"].items() if field != "dropout"}
    if made["lora"]:
        made["lora"]["dropout"] = 0.0
    if task == "mixture":
        sources = [{"path": str(folder / "lines.txt"), "weight": 3}, {"path": str(folder / "others.txt"), "weight": 1}]
        made["data"] |= {"train": None, "mixture": sources}
    return made | {"out": str(folder / f"{task} {name}")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each task one process and two; and two that SIGTERM stops at step 3 and that resume."""
    folder = tmp_path_factory.mktemp("runs")
    kill_points.write_texts(folder)
    kill_points.write_base(folder)
    (folder / "others.txt").write_text("".join(f"{line[::-1]}\n" for line in kill_points.LINES))
    for task in TASKS:
        train(Recipe.from_dict(fields(folder, task, "one")), progress=Silence())
    world = [{"recipe": fields(folder, task, "two"), "resume": False, "status": "finished"} for task in TASKS]
    stopped = {"recipe": fields(folder, STOPPED, "stopped"), "resume": False}
    world += [stopped | {"status": "interrupted", "stop_at": 3}, stopped | {"resume": True, "status": "finished"}]
    (folder / "runs.json").write_text(json.dumps(world))
    command = [sys.executable, HERE / "train_world.py", "2", folder / "runs.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def weights(folder):
    return {
        f"{file.name}: {name}": x for file in folder.glob("model/*.safetensors") for name, x in load_file(file).items()
    }


@pytest.mark.parametrize("task", TASKS)
def test_losses_metrics_and_weights_are_those_of_one_process(runs, task):
    one, two = metrics(runs / f"{task} one"), metrics(runs / f"{task} two")
    for own, expected in zip(two, one, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    expected = weights(runs / f"{task} one")
    assert expected
    torch.testing.assert_close(weights(runs / f"{task} two"), expected, rtol=1e-3, atol=1e-5)


def test_a_run_that_is_stopped_and_resumed_ends_in_the_same_bits(runs):
    straight, resumed = weights(runs / f"{STOPPED} two"), weights(runs / f"{STOPPED} stopped")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
