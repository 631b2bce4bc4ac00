"""Adapters that several processes train: losses, checkpoints and folders are those of one, and stopped runs resume.

Two processes hold parts of the rows of weights, or of the heads, features and experts of each layer (`tensor`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import phasor
from phasor.config.recipe import Recipe
from phasor.training import train
from phasor.training.progress import TrainingProgress
from phasor.training.trained import check_adapter

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
KINDS = {
    "lora": {"rank": 3, "targets": ["attention", "feedforward", "head"], "modules_to_save": ["decoder.norm.*"]},
    "dora": {"rank": 3, "kind": "dora", "targets": ["attention", "feedforward", "embedding"]},
    "experts": {"rank": 3, "kind": "rslora", "targets": ["attention", "experts"]},
    "biases": {"rank": 3, "kind": "dora", "targets": ["attention", "feedforward"]},
    "heads": {"rank": 3, "targets": ["attention", "feedforward", "embedding", "head"]},
}
SMALL = {"dim": 24, "num_heads": 6, "hidden_dim": 40, "num_layers": 2, "vocab_size": 300}
BASES = {"experts": "grok", "biases": "gpt", "heads": "theirs"}
MESHES = {"two": {}, "heads of two": {"tensor": 2}}
SOME = [
    ("lora", "two"),
    ("dora", "two"),
    ("dora", "heads of two"),
    ("experts", "heads of two"),
    ("heads", "heads of two"),
]
FULL = os.environ.get("PHASOR_EXAMPLES") == "full"
CASES = [(kind, mesh) for kind in KINDS for mesh in MESHES if FULL or (kind, mesh) in SOME]


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


def fields(folder, kind, name, **parallel):
    """Five steps with accumulation and an average, over packed documents of uneven lengths."""
    return {
        "init_from": str(folder / BASES.get(kind, "llama")),
        "parallel": parallel,
        "lora": KINDS[kind],
        "data": {"train": str(folder / "notes.txt"), "tokenizer": "bytes", "replace_tokenizer": True}
        | {"sequence_length": 12, "document": "line"},
        "train": {"steps": 5, "batch_tokens": 48, "device": "cpu", "log_every": 1, "evaluate_every": 9}
        | {"gradient_accumulation_steps": 2, "ema_decay": 0.9 if kind == "lora" else None},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"every": 2, "keep": 9, "best": False},
        "out": str(folder / f"{kind} {name}"),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each kind one process and two; and two that SIGTERM stops at step 3 and that resume."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [" ".join(str(n * k % 97) for n in range(k % 23 + 2)) for k in range(60)]
    (folder / "notes.txt").write_text("\n".join(lines))
    presets = [
        ("llama", "llama-2", {"embedding": {"tied": True}}),
        ("grok", "grok-1", {}),
        ("gpt", "gpt-2", {"dropout": {}}),
    ]
    for name, preset, more in presets:
        torch.manual_seed(0)
        model = phasor.Transformer(phasor.preset(preset, **SMALL, num_kv_heads=6 if name == "gpt" else 2, **more))
        for weight in model.parameters():
            if weight.dim() == 1:  # biases that are not zero
                torch.nn.init.normal_(weight, std=0.5)
        phasor.save(model, folder / name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder / "theirs")
    for kind in dict.fromkeys(kind for kind, _ in CASES):
        train(Recipe.from_dict(fields(folder, kind, "one")), progress=Silence())
    world = [
        {"recipe": fields(folder, kind, mesh, **MESHES[mesh]), "resume": False, "status": "finished"}
        for kind, mesh in CASES
    ]
    for name, parallel in MESHES.items():
        stopped = {"recipe": fields(folder, "dora", f"stopped {name}", **parallel), "resume": False}
        world += [stopped | {"status": "interrupted", "stop_at": 3}, stopped | {"resume": True, "status": "finished"}]
    (folder / "runs.json").write_text(json.dumps(world))
    command = [sys.executable, HERE / "train_world.py", "2", folder / "runs.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def tensors(folder, step):
    place = folder / "checkpoints" / f"step-{step:08d}"
    return {f"{file.stem}: {name}": x for file in place.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_losses_and_checkpoints_are_those_of_one_process(runs, kind, mesh):
    one, two = runs / f"{kind} one", runs / f"{kind} {mesh}"
    torch.testing.assert_close(losses(two), losses(one), rtol=0, atol=1e-5)
    expected, own = tensors(one, 2), tensors(two, 2)
    assert {name: (x.dtype, x.shape) for name, x in own.items()} == {n: (x.dtype, x.shape) for n, x in expected.items()}
    assert all(".lora." in name or ": decoder.norm." in name for name in own)
    for name, x in expected.items():
        torch.testing.assert_close(own[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_the_folder_holds_the_adapter_and_loads_with_its_base(runs, kind, mesh):
    tokens = torch.arange(40).view(2, 20)
    one, two = (phasor.load(runs / f"{kind} {name}") for name in ("one", mesh))
    base = phasor.load(runs / BASES.get(kind, "llama"))
    torch.testing.assert_close(two(tokens), one(tokens), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(one(tokens), base(tokens), atol=1e-3)
    assert not (runs / f"{kind} {mesh}" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_that_is_stopped_and_resumed_ends_in_the_same_bits(runs, mesh):
    straight, resumed = tensors(runs / f"dora {mesh}", 5), tensors(runs / f"dora stopped {mesh}", 5)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_quantized_base_is_not_cut_over_heads(runs):
    made = fields(runs, "lora", "nf4", tensor=2)
    made["train"] |= {"base_weights": "nf4"}
    with pytest.raises(ValueError, match="a base in nf4 is whole on every process, and not cut over heads"):
        check_adapter(Recipe.from_dict(made))
