"""Runs on a GPU that are killed and resumed end with the bits of one that was not, under `train.deterministic`."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from device import ON_GPU
from safetensors.torch import load_file

from phasor.config.model import ModelConfig
from phasor.device import deterministic_algorithms
from phasor.ops.attention import flash
from phasor.ops.attention.bias import DistanceBias
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.dispatch import force_path

STEPS = 40
KINDS = {
    "bfloat16 autocast": {},
    "dropout in attention": {"model": {"dropout": {"residual": 0.1, "attention": 0.1}}},
    "cuda graphs, float8, stochastic rounding": {
        "train": {"cuda_graphs": True, "precision": "float8", "param_dtype": "bfloat16"},
        "optimizer": {"rounding": "stochastic"},
    },
    "cuda graphs, averaged weights": {"train": {"cuda_graphs": True, "ema_decay": 0.9}},
    "t5": {"model": {"position": "t5"}},
    "experts": {"model": {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "top_k": 2}}}},
    "one document per row": {"data": {"document": "file"}},
    "masked": {"task": "mlm", "model": {"shape": "encoder"}},
    "compiled": {"train": {"compile": True}},
}


def write_recipe(folder, changes):
    """A recipe over random words, and its text, in a folder."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(300)]
    lines = [" ".join(draw.choices(words, k=draw.randint(30, 400))) for _ in range(1500)]
    (folder / "text.txt").write_text("\n".join(lines))
    model = {"dim": 256, "num_heads": 4, "num_layers": 2, "position": "rotary", "norm": "rmsnorm", "max_length": 512}
    recipe = {
        "model": model | {"feedforward": {"activation": "swiglu"}} | changes.get("model", {}),
        "data": {"train": str(folder / "text.txt"), "document": "line", "tokenizer": "bytes", "sequence_length": 512}
        | changes.get("data", {}),
        "train": {"steps": STEPS, "batch_tokens": 4096, "log_every": 1, "evaluate_every": 20, "device": "cuda"}
        | {"deterministic": True}
        | changes.get("train", {}),
        "optimizer": changes.get("optimizer", {}),
        "save": {"every": 5, "keep": 2},
        "task": changes.get("task", "lm"),
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))


def train_until(folder, out, *, resume=False, kill_at=None):
    """Train in a separate process; it is killed once it has logged that many steps."""
    command = [sys.executable, "-m", "phasor", "train", *([] if resume else [str(folder / "recipe.json")])]
    command += ["--out", str(out), *(["--resume"] if resume else [])]
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.005)
            metrics = out / "metrics.jsonl"
            if kill_at is not None and metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at:
                process.send_signal(signal.SIGKILL)
    assert process.wait() == (0 if kill_at is None else -signal.SIGKILL), (folder / "log.txt").read_text()[-2000:]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_twice_on_a_gpu_ends_with_the_same_bits(tmp_path, kind):
    write_recipe(tmp_path, KINDS[kind])
    train_until(tmp_path, tmp_path / "whole")
    train_until(tmp_path, tmp_path / "run", kill_at=8)
    train_until(tmp_path, tmp_path / "run", resume=True, kill_at=24)
    train_until(tmp_path, tmp_path / "run", resume=True)
    whole, run = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "run"))
    assert [name for name in whole if not torch.equal(whole[name], run[name])] == []


def test_the_kinds_are_models():
    sizes = {"vocab_size": 9, "dim": 8, "num_heads": 2, "num_layers": 1}
    for changes in KINDS.values():
        ModelConfig.from_dict(sizes | changes.get("model", {}))


def settings():
    mode = torch.utils.deterministic.fill_uninitialized_memory, torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), *mode


def test_deterministic_algorithms_are_restored():
    before = settings()
    with deterministic_algorithms():
        assert settings() == (True, False, False)
    assert settings() == before


@pytest.mark.parametrize("learned", [True, False])
def test_a_learned_table_of_biases_does_not_take_the_kernel_that_sums_it_in_any_order(learned):
    q = torch.randn(1, 4, 2, 16)
    positions = torch.arange(4)[None]
    bias = DistanceBias(table=torch.randn(3, 2, requires_grad=learned), min_distance=-1)
    how = Mask(causal=True), ScoreMod(scale=0.5, bias=bias, query_positions=positions, key_positions=positions)
    with force_path("triton"):
        assert flash.flash_unsupported_reason(q, q, q, *how) is None
        with deterministic_algorithms():
            assert (flash.flash_unsupported_reason(q, q, q, *how) is None) is not learned
