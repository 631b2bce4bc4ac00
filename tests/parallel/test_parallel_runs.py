"""Runs of several processes: their folders and checkpoints are those of one, and any other number resumes them."""

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
pytestmark = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")


def fields(folder, name, mesh=None):
    """A run of 6 steps with accumulation, dropout off, on packed documents of uneven lengths."""
    model = {"preset": "llama-2", "dim": 48, "num_heads": 6, "num_kv_heads": 3, "hidden_dim": 96, "num_layers": 2}
    model |= {"embedding": {"tied": True}}
    return {
        "model": model,
        "data": {"train": str(folder / "notes.txt"), "tokenizer": "bytes", "sequence_length": 12, "document": "line"},
        "train": {"steps": 6, "batch_tokens": 84, "device": "cpu", "log_every": 1, "evaluate_every": 3}
        | {"gradient_accumulation_steps": 2, "ema_decay": 0.9},
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"every": 2, "keep": 9, "best": False},
        "parallel": mesh or {},
        "out": str(folder / name),
    }


def run(recipe, status="finished", *, resume=False, **more):
    return {"recipe": recipe, "resume": resume, "status": status, **more}


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, three processes, in bfloat16 too, three that SIGTERM stops at step 3 and resume.

    "moved" is ended by one process, and "cut" goes from rows that are cut to blocks that are.
    """
    folder = tmp_path_factory.mktemp("runs")
    lines = [" ".join(str(n * k % 97) for n in range(k % 23 + 2)) for k in range(120)]
    (folder / "notes.txt").write_text("\n".join(lines))
    train(Recipe.from_dict(fields(folder, "one")), progress=Silence())
    stopped, moved = fields(folder, "stopped"), fields(folder, "moved", {"replicate": 3})
    cut = fields(folder, "cut", {"context": 3})
    half = fields(folder, "half")
    half["train"]["precision"] = "bfloat16"
    world = [
        run(fields(folder, "three")),
        run(half),
        run(stopped, "interrupted", stop_at=3),
        run(stopped, resume=True),
        run(moved, "interrupted", stop_at=3),
        run(cut, "interrupted", stop_at=3),
        run(cut | {"parallel": {"tensor": 3}}, resume=True),
    ]
    (folder / "runs.json").write_text(json.dumps(world))
    command = [sys.executable, HERE / "train_world.py", "3", folder / "runs.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    train(Recipe.from_dict(moved | {"parallel": {}}), True, Silence())
    return folder


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, [line.get("tokens") for line in lines]


def tensors(folder, step):
    place = folder / "checkpoints" / f"step-{step:08d}"
    ArtifactFolder(place, "checkpoint").verify()
    return {f"{file.stem}: {name}": x for file in place.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("name", ["three", "stopped", "moved", "cut"])
def test_the_losses_and_the_tokens_are_those_of_one_process(runs, name):
    own, tokens = losses(runs / name)
    expected, expected_tokens = losses(runs / "one")
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert tokens == expected_tokens  # no row is lost or repeated


def test_checkpoints_have_the_files_names_and_shapes_of_one_process(runs):
    expected = tensors(runs / "one", 4)
    for run_name in ("three", "moved", "cut"):
        own = tensors(runs / run_name, 4)
        assert {name: (x.dtype, x.shape) for name, x in own.items()} == {
            name: (x.dtype, x.shape) for name, x in expected.items()
        }
        for name, x in expected.items():
            torch.testing.assert_close(own[name], x, rtol=1e-3, atol=1e-5)
        files = [runs / name / "checkpoints/step-00000004/model.safetensors" for name in ("one", run_name)]
        assert files[0].read_bytes()[:400] == files[1].read_bytes()[:400]  # the header


def test_a_run_that_is_stopped_and_resumed_on_its_mesh_ends_in_the_same_bits(runs):
    straight, resumed = tensors(runs / "three", 6), tensors(runs / "stopped", 6)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert {file.name for file in (runs / "stopped/checkpoints").iterdir()} >= {"step-00000003", "step-00000006"}


def test_the_folder_is_whole_and_holds_the_model(runs):
    for name in ("three", "half", "stopped", "moved", "cut"):
        ArtifactFolder(runs / name, "run").verify()
        ArtifactFolder(runs / name / "model", "model").verify()
    expected = load_file(runs / "one/model/model.safetensors")
    for name in ("three", "half", "cut"):
        own = load_file(runs / name / "model/model.safetensors")
        assert {n: x.shape for n, x in own.items()} == {n: x.shape for n, x in expected.items()}
        assert (runs / name / "samples.txt").exists()
