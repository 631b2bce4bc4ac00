"""Runs of several processes that are killed anywhere: they resume with the same bits, or on another mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phasor.artifacts import ArtifactFolder
from phasor.config.recipe import Recipe
from phasor.training import train
from phasor.training.progress import TrainingProgress

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")]
KILLS = {
    "one in a step": ("step", [1]),
    "all in a step": ("step", [0, 1]),
    "the first in a save": ("save", [0]),
    "another in a save": ("save", [1]),
    "all in a save": ("save", [0, 1]),
}


def fields(folder, name, mesh=None, dropout=0.1):
    """A run of 7 steps with accumulation."""
    return {
        "model": {"preset": "llama-2", "dim": 32, "num_heads": 4, "num_layers": 2, "hidden_dim": 48}
        | {"dropout": {"residual": dropout, "attention": dropout}},
        "data": {"train": str(folder / "notes.txt"), "tokenizer": "bytes", "sequence_length": 32, "document": "line"},
        "train": {"steps": 7, "batch_tokens": 224, "device": "cpu", "log_every": 1, "evaluate_every": 3}
        | {"gradient_accumulation_steps": 2, "ema_decay": 0.9},
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"every": 2, "keep": 9, "best": False},
        "parallel": mesh or {},
        "out": str(folder / name),
    }


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


def start(script, *arguments):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / script, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def kill(folder, recipe, at, ranks):
    """Start a run whose processes are killed; what the others said."""
    (folder / "recipe.json").write_text(json.dumps(recipe))
    done = start("kill_world.py", 2, folder / "recipe.json", at, *ranks)
    assert done.returncode != 0
    return done.stderr


def resume(folder, size, *recipes, again=True):
    runs = [{"recipe": recipe, "resume": again, "status": "finished"} for recipe in recipes]
    (folder / "runs.json").write_text(json.dumps(runs))
    done = start("train_world.py", size, folder / "runs.json")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path):
    lines = [" ".join(str(n * k % 97) for n in range(k % 23 + 2)) for k in range(120)]
    (tmp_path / "notes.txt").write_text("\n".join(lines))
    return tmp_path


def tensors(run, step):
    place = run / "checkpoints" / f"step-{step:08d}"
    ArtifactFolder(place, "checkpoint").verify()
    return {f"{file.stem}: {name}": x for file in place.glob("*.safetensors") for name, x in load_file(file).items()}


def log(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, [line.get("tokens") for line in lines]


def check_same_bits(folder, names):
    """That runs of these names ended as the one that was never killed did."""
    expected = tensors(folder / "straight", 7)
    for name in names:
        found = tensors(folder / name, 7)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items()), name
        assert log(folder / name) == log(folder / "straight"), name


def test_killed_runs_resume_with_the_same_bits(folder):
    resume(folder, 2, fields(folder, "straight"), again=False)
    for name, (at, ranks) in KILLS.items():
        said = kill(folder, fields(folder, name), at, ranks)
        kept = sorted(path.name for path in (folder / name / "checkpoints").iterdir() if path.name[0] != ".")
        assert kept[-1] == ("step-00000004" if at == "step" else "step-00000003"), name  # the best one so far
        if ranks == [1]:  # the first one holds the store where they meet, unless torchrun does
            assert "a process of this run ended or cannot be reached; resuming continues" in said, name
    resume(folder, 2, *(fields(folder, name) for name in KILLS))
    check_same_bits(folder, KILLS)


@pytest.mark.parametrize("axis", ["replicate", "tensor", "context"])
def test_killed_runs_on_other_meshes_resume_with_the_same_bits(folder, axis):
    recipes = {name: fields(folder, name, {axis: 2}, 0.0) for name in ("straight", "all in a step", "all in a save")}
    resume(folder, 2, recipes.pop("straight"), again=False)
    for name, recipe in recipes.items():
        kill(folder, recipe, *KILLS[name])
    resume(folder, 2, *recipes.values())
    check_same_bits(folder, recipes)


def test_killed_runs_resume_on_another_mesh_without_a_row_lost_or_repeated(folder):
    train(Recipe.from_dict(fields(folder, "one", dropout=0.0)), progress=Silence())
    kill(folder, fields(folder, "three", {"tensor": 2}, 0.0), "save", [1])
    kill(folder, fields(folder, "alone", dropout=0.0), "step", [0])
    resume(folder, 3, fields(folder, "three", {"replicate": 3}, 0.0))
    train(Recipe.from_dict(fields(folder, "alone", dropout=0.0)), True, Silence())
    expected, tokens = log(folder / "one")
    for name in ("three", "alone"):
        found, found_tokens = log(folder / name)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert found_tokens == tokens
