"""Models cut over processes generate, evaluate and translate as in one process; each process holds its parts alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_cases import config

import phasor
from phasor.cli import main
from phasor.config.generation import SpecialTokens
from phasor.config.recipe import Recipe
from phasor.data.tokenizers import byte_tokenizer
from phasor.training import train
from phasor.training.progress import TrainingProgress

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
NEW = ["--max-new-tokens", "8", "--json"]
GENERATE = {
    "greedy": ["--prompt", "The cat"],
    "prompts": ["--prompts", "notes.txt", "--temperature", "0.9", "--seed", "3"],
    "beams": ["--prompt", "The cat", "--num-beams", "3"],
    "draft": ["--prompt", "The cat", "--draft", "draft"],
}


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


def save_model(folder, name, format="phasor", **fields):
    torch.manual_seed(1)
    own = config(name).replace(vocab_size=261, **fields)
    model = phasor.Transformer(own)
    ends = "<bos> $A" if model.encoder is None else "$A <eos>"
    model.tokenizer, model.special = byte_tokenizer(ends), SpecialTokens(start=1, stop=(2,))
    phasor.save(model, folder, format)


def train_run(folder):
    """A run with averaged weights, which its checkpoints are read with."""
    train(
        Recipe.from_dict(
            {
                "model": {"preset": "llama-2", "dim": 32, "num_heads": 4, "num_layers": 2},
                "data": {"train": "notes.txt", "valid": "notes.txt", "tokenizer": "bytes", "sequence_length": 32},
                "train": {"steps": 2, "batch_tokens": 128, "device": "cpu", "ema_decay": 0.9},
                "out": str(folder),
            }
        ),
        progress=Silence(),
    )


def write_world():
    """Models of several kinds and formats in a folder, and commands that run them, by name."""
    Path("notes.txt").write_text("The cat sat.\nA dog.\nThe rat, which the cat saw, ran away.\n")
    save_model("lm", "tied llama")
    save_model("draft", "tied llama", num_layers=1)
    save_model("pairs", "encoder-decoder")
    save_model("experts", "experts")
    save_model("hf lm", "tied llama", "hf")
    save_model("hf pairs", "encoder-decoder", "hf")
    Path("folders.json").write_text(json.dumps(["lm", "pairs", "experts", "hf lm", "hf pairs"]))
    commands = {name: ["generate", "lm", *how, *NEW] for name, how in GENERATE.items()}
    commands["stream"] = ["generate", "lm", "--prompt", "The", "--max-new-tokens", "8", "--stream"]
    for name, model in (("run", ["run"]), ("checkpoint", ["run", "--checkpoint", "2"]), ("folder", ["lm"])):
        commands[f"evaluate {name}"] = ["evaluate", *model, "--data", "notes.txt", "--device", "cpu", "--json"]
    commands["translate"] = ["translate", "pairs", "one two", "", "three", "--device", "cpu", "--max-new-tokens", "8"]
    return commands


SOME = ("prompts", "draft", "evaluate folder", "translate")


@pytest.mark.parametrize(("size", "names"), [(2, SOME), pytest.param(3, None, marks=pytest.mark.slow)])
def test_the_first_process_prints_what_one_process_prints(size, names, tmp_path, monkeypatch, capsys):
    """And what each of them holds is compared in the processes themselves."""
    monkeypatch.chdir(tmp_path)
    commands = {name: how for name, how in write_world().items() if names is None or name in names}
    if any("run" in how for how in commands.values()):
        train_run(tmp_path / "run")
    Path("commands.json").write_text(json.dumps(commands))
    command = [sys.executable, HERE / "inference_world.py", str(size), tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, arguments in commands.items():
        assert main(arguments) == 0
        expected, found = capsys.readouterr().out, Path(f"{name}-0.txt").read_text()
        if name.startswith("evaluate"):
            one, several = json.loads(expected), json.loads(found)
            assert all(several[field] == one[field] for field in ("task", "weights", "documents", "tokens", "bytes"))
            assert several["loss"] == pytest.approx(one["loss"], abs=1e-6)
        elif arguments[-1] == "--json":
            assert [each["tokens"] for each in flatten(json.loads(found))] == [
                each["tokens"] for each in flatten(json.loads(expected))
            ]
        else:
            assert found == expected, name
        assert all(Path(f"{name}-{rank}.txt").read_text() == "" for rank in range(1, size))


def flatten(results):
    return [one for inner in results for one in flatten(inner)] if isinstance(results, list) else [results]
