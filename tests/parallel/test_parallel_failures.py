"""What goes wrong under torchrun: one sentence, all processes end, and nothing hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from phasor.cli.recipe_options import name_options
from phasor.config.recipe import MeshConfig, Recipe
from phasor.parallel.processes import Processes
from phasor.training import follower
from phasor.training.build import check_model
from phasor.training.run import RunFolder
from phasor.training.sharded import ShardedTrainer
from phasor.training.trainer import derive_seed

ON_CPU = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
SMALL = [
    *("--model.dim", "32", "--model.hidden-dim", "64", "--model.num-layers", "1"),
    *(
        "--train.device",
        "cpu",
        "--train.batch-tokens",
        "256",
        "--data.tokenizer",
        "bytes",
        "--data.sequence-length",
        "32",
    ),
]
FAILING = """
import os, sys, time
from pathlib import Path
from phasor.cli import main
from phasor.data.prefetch import StepBatches
from phasor.parallel.shards import Shards
from phasor.training.sharded import ShardedTrainer

how, place, rank = sys.argv.pop(1).split(":")
owner, name = {"step": (ShardedTrainer, "train_step"), "data": (StepBatches, "take"), "save": (Shards, "gather")}[place]
original, calls = getattr(owner, name), []

def fail(*given):
    calls.append(name)
    if len(calls) == 3 and os.environ["RANK"] == rank:
        if how == "error":
            Path("failed").write_text(str(time.time()))
            raise ValueError("row 7 cannot be read")
        os.kill(os.getpid(), 9) if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    return original(*given)

setattr(owner, name, fail)
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("mesh", "processes", "said"),
    [
        ({"replicate": 3}, 4, "MeshConfig.replicate (3) must divide the number of processes, which is 4"),
        ({"replicate": 2, "shard": 3}, 4, "x MeshConfig.shard (3) must be the number of processes, which is 4"),
        (
            {"tensor": 3},
            4,
            "MeshConfig.tensor (3) must divide the number of processes, which is 4: 3 processes would fit",
        ),
        ({"context": 2, "tensor": 4}, 4, "MeshConfig.context (2) x MeshConfig.tensor (4) must divide the number"),
        ({"tensor": 2}, 1, "MeshConfig.tensor (2) asks for 2 processes, and this is one: start them with torchrun"),
        ({"shard": 4}, 1, "asks for 4 processes, and this is one: start them with torchrun --nproc-per-node 4"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_refused(mesh, processes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MeshConfig(**mesh).sizes(processes)


@pytest.mark.parametrize(
    ("mesh", "processes", "sizes"),
    [
        ({}, 8, (1, 8, 1, 1)),
        ({"replicate": 2}, 8, (2, 4, 1, 1)),
        ({"replicate": 2, "tensor": 2, "context": 2}, 16, (2, 2, 2, 2)),
        ({}, 1, (1, 1, 1, 1)),
    ],
)
def test_what_is_left_over_is_sharded(mesh, processes, sizes):
    assert MeshConfig(**mesh).sizes(processes) == sizes


LLAMA = {"preset": "llama-2", "dim": 32, "num_heads": 4, "num_layers": 1, "hidden_dim": 40}
ROUTED = {"feedforward": {"experts": {"num_experts": 6, "top_k": 2, "shared_dim": 20}}, "hidden_dim": 32}


@pytest.mark.parametrize(
    ("model", "mesh", "length", "said"),
    [
        (
            {"num_kv_heads": 2},
            {"tensor": 4},
            32,
            "--parallel.tensor=4 does not divide the 2 key/value heads: --parallel.tensor can be 1 or 2",
        ),
        ({"num_heads": 16}, {"tensor": 16}, 32, "--parallel.tensor=16 does not divide the 40 features of the hidden"),
        (ROUTED, {"tensor": 4}, 32, "--parallel.tensor=4 does not divide the 6 experts: --parallel.tensor can be 1, 2"),
        ({"attention": {"qk_norm": "whole"}}, {"tensor": 2}, 32, "qk_norm 'whole' normalizes all heads together"),
        (
            {},
            {"context": 2, "tensor": 2},
            100,
            "--data.sequence-length 100 is not divisible by 2 x --parallel.context "
            "x --parallel.tensor = 8: 96 would be",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_data_are_prepared(model, mesh, length, said):
    fields = {"model": LLAMA | model, "parallel": mesh, "data": {"sequence_length": length}}
    with pytest.raises(ValueError, match="tensor") as refused:
        check_model(Recipe.from_dict(fields), processes=16)
    assert said in name_options(str(refused.value), {})


def test_a_folder_that_the_machines_do_not_share_is_refused(tmp_path, monkeypatch):
    """Where the other machine has a folder of the same name, of an earlier run of the same recipe, too."""
    monkeypatch.setattr(follower, "APPEARS_SECONDS", 0.0)
    recipe, other = Recipe(), follower.FollowerRunFolder(tmp_path / "there/run", Recipe(), resume=False)
    with RunFolder(tmp_path / "here/run", recipe, resume=False) as run:
        token = run.write_token()
        follower.FollowerRunFolder(tmp_path / "here/run", recipe, resume=False).check_visible(token)
        with pytest.raises(ValueError, match=r"there/run is not on all machines of the run: Recipe\.out has to be"):
            other.check_visible(token)
    with RunFolder(tmp_path / "there/run", recipe, resume=False) as earlier:
        earlier.write_token()
    with pytest.raises(ValueError, match="is not on all machines of the run"):
        other.check_visible(token)


@pytest.mark.parametrize("step", [0, 5])
def test_every_process_drops_out_with_a_seed_of_its_own(step):
    """The first one has the seed of a process that is alone."""
    seeds = []
    for rank in range(4):
        trainer = ShardedTrainer.__new__(ShardedTrainer)
        trainer.recipe, trainer.device, trainer.processes = Recipe(), torch.device("cpu"), Processes()
        trainer.processes.rank = rank
        trainer.seed(step, 1)
        seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 4
    assert seeds[0] == derive_seed(Recipe().train.seed, step, 1)


def torchrun(folder, *command, options=(), size=2):
    """The command on some processes of this machine; `command` begins with -m and a module, or a file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options]
    notes = folder / "notes.txt"
    if not notes.exists():
        notes.write_text("The cat sat on the mat, and saw the rat. " * 300)
    data = ["--data.train", str(notes), "--data.valid", str(notes), *SMALL]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *command, *data], cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def sentences(process, timeout=240):
    """What phasor said to standard error, without the lines of torchrun."""
    said = process.communicate(timeout=timeout)[1]
    return [line for line in said.splitlines() if line.startswith("phasor: ")]


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--parallel.replicate", "3"],
            "phasor: --parallel.replicate (3) must divide the number of processes, which is 2",
        ),
        (["--train.cuda-graphs", "true"], "phasor: --train.cuda-graphs captures the step of a process that is alone"),
        (["--train.stepz", "3"], "phasor: unrecognized arguments: --train.stepz"),
        (["--model.norm", "rmsnrom"], "phasor: "),
    ],
)
def test_a_mistake_is_reported_once_and_leaves_nothing(tmp_path, options, said):
    process = torchrun(tmp_path, "-m", "phasor", "train", "--out", "run", *options)
    lines = sentences(process)
    assert process.returncode != 0
    assert len(lines) == 1, lines
    assert lines[0].startswith(said)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("place", ["step:1", "data:0", "data:1", "save:0", "save:1"])
def test_an_error_in_one_process_ends_all_with_its_sentence(tmp_path, place):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    how = ["--train.steps", "50", "--save.every", "4"]
    process = torchrun(tmp_path, str(script), f"error:{place}", "train", "--out", "run", *how)
    lines = sentences(process)
    assert process.returncode != 0
    assert lines == ["phasor: row 7 cannot be read"]
    assert time.time() - float((tmp_path / "failed").read_text()) < 10


@pytest.mark.slow
@ON_CPU
def test_torchrun_starts_again_from_the_newest_checkpoint_after_a_process_died(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    how = ["--train.steps", "4", "--save.every", "1", "--train.log-every", "1"]
    process = torchrun(
        tmp_path, str(script), "kill:step:1", "train", "--out", "run", *how, options=["--max-restarts", "1"]
    )
    said = sentences(process)
    assert process.returncode == 0, said
    assert "phasor: resuming from step-00000002 of 4 steps" in said
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
@ON_CPU
def test_sigterm_to_torchrun_saves_one_checkpoint(tmp_path):
    how = ["--train.steps", "100000", "--train.log-every", "1", "--save.every", "100000"]
    process = torchrun(tmp_path, "-m", "phasor", "train", "--out", "run", *how)
    metrics = tmp_path / "run/metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = sentences(process)
    saved = [place.name for place in (tmp_path / "run/checkpoints").iterdir()]
    assert len(saved) == 1, said
    assert any("which is saved; resume to continue" in line for line in said)
