"""The weights that a run of several processes begins with: drawn or read one by one, they are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from parallel_cases import MODELS, config

import phasor
from phasor.config.recipe import Recipe
from phasor.data.tokenizers import SpecialIds, byte_tokenizer
from phasor.parallel.fresh import fresh_weights
from phasor.training import train
from phasor.training.build import build_model, outline_model
from phasor.training.datasets import Datasets, EpochBatches
from phasor.training.progress import TrainingProgress
from phasor.transformer import Transformer

HERE = Path(__file__).parent


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_fresh_weights_are_those_of_a_whole_model(name):
    torch.manual_seed(7)
    whole = dict(Transformer(config(name)).named_parameters())
    after = torch.rand(3)
    drawn = dict(fresh_weights(config(name), 7))
    assert torch.equal(torch.rand(3), after)  # generators are where they would be
    assert drawn.keys() == whole.keys()
    assert all(torch.equal(drawn[name], weight) for name, weight in whole.items())


def save_model(folder, format):
    """A model in bfloat16, so that reading it in float32 changes its dtype."""
    torch.manual_seed(3)
    model = phasor.Transformer(config("tied llama").replace(vocab_size=261)).bfloat16()
    model.tokenizer = byte_tokenizer()
    phasor.save(model, folder, format)


@pytest.mark.parametrize("format", ["phasor", "hf"])
@pytest.mark.parametrize("changes", [{}, {"dropout": {"residual": 0.1}}])
def test_a_model_that_is_fine_tuned_has_the_weights_of_its_folder(tmp_path, format, changes):
    save_model(tmp_path / "model", format)
    recipe = Recipe(init_from=str(tmp_path / "model"), model=changes)
    no_batches = cast(EpochBatches, None)  # building a model reads none
    datasets = Datasets(byte_tokenizer(), no_batches, no_batches, SpecialIds(), longest=32)
    whole = build_model(recipe, datasets)
    outline, weights = outline_model(recipe, datasets, None, verify=True)
    assert outline.config == whole.config
    assert all(weight.is_meta and weight.dtype == torch.float32 for weight in outline.parameters())
    assert (outline.special, outline.generation_settings) == (whole.special, whole.generation_settings)
    read = {name: weight.float() for name, weight in weights}
    assert all(torch.equal(read.pop(name), weight) for name, weight in whole.named_parameters())
    assert not read


@pytest.mark.slow
@pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
def test_several_processes_fine_tune_as_one(tmp_path):
    save_model(tmp_path / "model", "hf")
    (tmp_path / "notes.txt").write_text("The cat sat on the mat, and saw the rat. " * 100)
    notes = str(tmp_path / "notes.txt")
    recipe = {
        "data": {"train": notes, "valid": notes, "tokenizer": "auto", "sequence_length": 32},
        "train": {"steps": 3, "batch_tokens": 128, "device": "cpu", "log_every": 1},
        "init_from": str(tmp_path / "model"),
    }
    train(Recipe.from_dict(recipe | {"out": str(tmp_path / "one")}), progress=Silence())
    runs = [{"recipe": recipe | {"out": str(tmp_path / "three")}, "resume": False, "status": "finished"}]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, HERE / "train_world.py", "3", tmp_path / "runs.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, three = (
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "three")
    )
    torch.testing.assert_close(three[:3], one[:3], rtol=0, atol=1e-5)
