"""Several processes train what one process trains: losses, gradients, validation, and what each of them holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_cases import MODELS, PackedBatches, config, model, recipe
from safetensors.torch import load_file

from phasor.data.prefetch import StepBatches
from phasor.training.trainer import Trainer
from phasor.transformer import Transformer

HERE = Path(__file__).parent
STEPS = 5
MESHES = {"replicated": {"replicate": 4}, "sharded": {}, "hybrid": {"replicate": 2}}
OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    "regularized": {"label_smoothing": 0.1, "z_loss": 1e-3, "ema_decay": 0.9, "max_grad_norm": 0.5},
}


def cases():
    """Every model sharded, one on every mesh, and two models with options."""
    found = {f"{name}, sharded": {"model_name": name, "mesh": {}, "train": {}} for name in MODELS}
    found |= {
        f"tied llama, {mesh}": {"model_name": "tied llama", "mesh": sizes, "train": {}}
        for mesh, sizes in MESHES.items()
    }
    for option, train in OPTIONS.items():
        found |= {
            f"{name}, {option}": {"model_name": name, "mesh": {}, "train": train} for name in ("experts", "tied llama")
        }
    return found


CASES = cases()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What four processes found in all cases."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "cases.json").write_text(json.dumps({name: case | {"steps": STEPS} for name, case in CASES.items()}))
    command = [sys.executable, HERE / "world.py", "4", folder, folder / "cases.json"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(4)]
    return folder, results


def train_alone(name, train):
    """The same by one process: results of steps, the first gradients, the validation loss."""
    given = recipe(**train)
    trainer = Trainer(model(name), given, STEPS)
    accumulation = given.train.gradient_accumulation_steps
    batches = StepBatches(PackedBatches(name), accumulation_steps=accumulation, workers=0, device="cpu")
    trainer.forward_backward(0, *batches.take(0))
    gradients = {n: w.grad.clone() for n, w in trainer.model.named_parameters() if w.grad is not None}
    results = [trainer.train_step(step, *batches.take(step)).result() for step in range(STEPS)]
    return results, gradients, trainer.validation_loss([PackedBatches(name)[i] for i in (7, 8)], lambda: False)


@pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
@pytest.mark.parametrize("case", CASES)
def test_several_processes_train_as_one(world, case):
    folder, found = world
    results, gradients, validation = train_alone(CASES[case]["model_name"], CASES[case]["train"])
    first = found[0][case]
    assert all(each[case]["losses"] == first["losses"] for each in found)  # to the last bit
    torch.testing.assert_close(first["losses"], [r.loss for r in results], rtol=0, atol=1e-5)
    torch.testing.assert_close(first["norms"], [r.grad_norm for r in results], rtol=1e-4, atol=1e-5)
    assert first["validation"] == pytest.approx(validation, abs=1e-5)
    theirs = load_file(folder / f"{case}.safetensors")
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max())
        assert float((theirs[name] - gradient).abs().max()) <= 1e-5 * largest + 1e-9, name


@pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
def test_a_process_holds_its_part_alone(world):
    """1.1 of a fourth: a few small weights are not divisible by four."""
    with torch.device("meta"):
        whole = sum(weight.numel() for weight in Transformer(config("tied llama")).parameters())
    most = world[1][0]["tied llama, sharded"]["most"]
    assert most["weights"] <= 1.1 * whole / 4
    assert most["gradients"] <= 1.1 * whole / 4
    assert most["moments"] <= 1.1 * 2 * whole / 4
    assert world[1][0]["tied llama, hybrid"]["most"]["weights"] <= 1.1 * whole / 2
    assert world[1][0]["tied llama, replicated"]["most"]["weights"] == whole
