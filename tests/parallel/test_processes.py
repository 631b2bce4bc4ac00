"""Several processes train what one process trains: losses, gradients, validation, and what each of them holds."""

import functools
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
STEPS = 5 if os.environ.get("PHASOR_EXAMPLES") == "full" else 2
ON_CPU = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
MESHES = {
    "sharded": {},
    "replicated": {"replicate": 4},
    "tensor": {"tensor": 4},
    "context": {"context": 4},
    "hybrid": {"replicate": 2},
    "shard and tensor": {"tensor": 2},
    "shard and context": {"context": 2},
    "replicate and tensor": {"replicate": 2, "tensor": 2},
    "replicate and context": {"replicate": 2, "context": 2},
    "context and tensor": {"context": 2, "tensor": 2},
}
OPTIONS = {
    "": {},
    "accumulated": {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    "regularized": {"label_smoothing": 0.1, "z_loss": 1e-3, "ema_decay": 0.9, "max_grad_norm": 0.5},
}
HALF = {
    f"{name}, {mesh}, bfloat16": {"model_name": name, "mesh": MESHES[mesh], "train": {"precision": "bfloat16"}}
    for name, mesh in (("tied llama", "sharded"), ("alibi", "context and tensor"))
}
# Every mesh, and models whose parts are cut in different ways: the model, the option.
FAST = {
    "sharded": [
        *((name, "") for name in ("tied llama", "encoder-decoder", "few experts")),
        ("experts", "accumulated"),
    ],
    "replicated": [("tied llama", "")],
    "hybrid": [("tied llama", "")],
    "tensor": [("experts", ""), ("transformerxl", ""), ("shared projections", "")],
    "context": [("tied llama", "")],
    "shard and tensor": [("tied llama", "accumulated")],
    "shard and context": [("alibi", "regularized")],
    "replicate and tensor": [("encoder", "regularized")],
    "replicate and context": [("experts", "regularized")],
    "context and tensor": [
        ("encoder-decoder", "accumulated"),
        ("latent", ""),
        ("states", ""),
        ("indexer", ""),
        ("windows and sinks", ""),
        ("forget gates", ""),
        ("shaw", ""),
    ],
}


def case_of(name, mesh, option):
    return {"model_name": name, "mesh": MESHES[mesh], "train": OPTIONS[option]}


def case_name(name, mesh, option):
    return ", ".join(filter(None, (name, mesh, option)))


def can_cut(name, mesh):
    return mesh != "tensor" or (config(name).num_kv_heads % 4 == 0 and name != "few experts")


FAST_CASES = {case_name(n, mesh, o): case_of(n, mesh, o) for mesh, listed in FAST.items() for n, o in listed}
ALL_CASES = {
    case_name(name, mesh, option): case_of(name, mesh, option)
    for mesh in MESHES
    for name in MODELS
    for option in (OPTIONS if name == "experts" else ["", "accumulated"])
    if can_cut(name, mesh)
}


def run_world(folder, cases, steps, timeout=300):
    """What four processes found in all cases."""
    (folder / "cases.json").write_text(json.dumps({name: case | {"steps": steps} for name, case in cases.items()}))
    command = [sys.executable, HERE / "world.py", "4", folder, folder / "cases.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SECONDS": str(timeout - 20)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return folder, [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run_world(tmp_path_factory.mktemp("world"), FAST_CASES | HALF, STEPS)


@functools.cache
def train_alone(name, option, steps, precision="auto"):
    """The same by one process: results of steps, the first gradients, the validation loss."""
    given = recipe(**OPTIONS[option], precision=precision)
    trainer = Trainer(model(name), given, steps)
    accumulation = given.train.gradient_accumulation_steps
    batches = StepBatches(PackedBatches(name), accumulation_steps=accumulation, workers=0, device="cpu")
    first = trainer.train_step(0, *batches.take(0)).result()
    gradients = {n: w.grad.clone() for n, w in trainer.model.named_parameters() if w.grad is not None}
    results = [first, *(trainer.train_step(step, *batches.take(step)).result() for step in range(1, steps))]
    return results, gradients, trainer.validation_loss([PackedBatches(name)[i] for i in (7, 8)], lambda: False)


def check_case(world, case, given, steps=STEPS, within=1e-5):
    """Several processes found what one process finds, which does not compile."""
    folder, found = world
    alone = {name: value for name, value in given["train"].items() if name != "compile"}
    option = next(option for option, train in OPTIONS.items() if train == alone)
    results, gradients, validation = train_alone(given["model_name"], option, steps)
    first = found[0][case]
    assert all(each[case]["losses"] == first["losses"] for each in found)  # to the last bit
    torch.testing.assert_close(first["losses"], [r.loss for r in results], rtol=0, atol=within)
    torch.testing.assert_close(first["norms"], [r.grad_norm for r in results], rtol=10 * within, atol=within)
    assert first["validation"] == pytest.approx(validation, abs=within)
    theirs = load_file(folder / f"{case}.safetensors")
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max())
        assert float((theirs[name] - gradient).abs().max()) <= 1e-5 * largest + 1e-9, name


@ON_CPU
@pytest.mark.parametrize("case", FAST_CASES)
def test_several_processes_train_as_one(world, case):
    check_case(world, case, FAST_CASES[case])


@ON_CPU
@pytest.mark.parametrize("case", HALF)
def test_blocks_are_gathered_in_the_dtype_of_their_products(world, case):
    """Of 8 bits, as the weights of norms are then; gradients and weights stay float32."""
    folder, found = world
    assert found[0][case]["gathered"] == "torch.bfloat16"
    results, gradients, validation = train_alone(HALF[case]["model_name"], "", STEPS, "bfloat16")
    assert all(each[case]["losses"] == found[0][case]["losses"] for each in found)
    torch.testing.assert_close(found[0][case]["losses"], [r.loss for r in results], rtol=1e-2, atol=0)
    assert found[0][case]["validation"] == pytest.approx(validation, rel=1e-2)
    theirs = load_file(folder / f"{case}.safetensors")
    for name, gradient in gradients.items():
        assert theirs[name].dtype == torch.float32
        assert float((theirs[name] - gradient).norm()) <= 5e-2 * float(gradient.norm()), name


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_model_on_every_mesh(tmp_path, mesh):
    """All steps within 1e-5, as above, and the first gradients."""
    cases = {name: case for name, case in ALL_CASES.items() if case["mesh"] == MESHES[mesh]}
    world = run_world(tmp_path, cases, STEPS, timeout=1200)
    for name, case in cases.items():
        check_case(world, name, case)


@ON_CPU
@pytest.mark.slow
def test_compiled_blocks_train_as_well(tmp_path):
    """With accumulation and activation checkpointing."""
    given = case_of("tied llama", "context and tensor", "accumulated")
    given["train"] = given["train"] | {"compile": True}
    check_case(run_world(tmp_path, {"compiled": given}, 3, timeout=1200), "compiled", given, 3)


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor", "context", "shard and tensor", "context and tensor"])
def test_twenty_steps_stay_close(tmp_path, mesh):
    names = [name for name in ("tied llama", "encoder-decoder", "alibi", "deepnorm", "experts") if can_cut(name, mesh)]
    cases = {case_name(name, mesh, ""): case_of(name, mesh, "") for name in names}
    world = run_world(tmp_path, cases, 20, timeout=1200)
    for name, case in cases.items():
        check_case(world, name, case, 20, within=1e-4)


@ON_CPU
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
    with torch.device("meta"):
        whole = sum(weight.numel() for weight in Transformer(config("few experts")).parameters())
    assert world[1][0]["few experts, sharded"]["most"]["weights"] <= 1.1 * whole / 4
