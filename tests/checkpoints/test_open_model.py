"""`open_model`: runs, their checkpoints, model folders, and models that are loaded already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding import speaker
from safetensors.torch import load_file
from training_runs import Notes, recipe

import phasor
from phasor.checkpoints.open_model import open_model
from phasor.evaluation.lm_eval import HarnessModel
from phasor.training import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with the checkpoints of two of them."""
    place = tmp_path_factory.mktemp("runs")
    (place / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(40)))
    data = {"train": str(place / "text.txt"), "tokenizer": "bytes", "document": "line", "sequence_length": 32}
    train(recipe(place / "run", train__steps=4, data=data), progress=Notes())
    return place / "run"


def weight(folder: Path) -> torch.Tensor:
    """What a folder stores, as safetensors reads it."""
    return load_file(folder / "model.safetensors")["tokens.weight"]


@pytest.mark.parametrize("checkpoint", [None, 2, "2", "last"])
def test_the_weights_of_a_run_and_of_its_checkpoints(run: Path, checkpoint: str | int | None) -> None:
    step = 4 if checkpoint == "last" else 2
    expected = run / "model" if checkpoint is None else run / "checkpoints" / f"step-{step:08d}"
    model, folder = open_model(run, "cpu", checkpoint=checkpoint)
    assert folder == expected
    assert torch.equal(model.tokens.weight, weight(expected))
    harness = HarnessModel(str(run), device="cpu", checkpoint=checkpoint)
    assert harness.folder == expected
    assert torch.equal(harness.model.tokens.weight, weight(expected))


def test_a_folder_and_a_dtype(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path / "model")
    model, folder = open_model(str(tmp_path / "model"), "cpu", torch.float64)
    assert folder == tmp_path / "model"
    assert torch.equal(model.tokens.weight, weight(tmp_path / "model").double())


def test_a_model_is_given_back_where_it_is() -> None:
    model = speaker()
    assert open_model(model) == (model, None)
    assert open_model(model, "cpu", model.tokens.dtype) == (model, None)
    for given in ({"checkpoint": "last"}, {"dtype": torch.float64}):
        with pytest.raises(ValueError, match="for the folder of a model, and not for a model"):
            open_model(model, **given)


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint is for the folder of a run, and .*model is none"):
        open_model(run / "model", checkpoint="best")
    with pytest.raises(ValueError, match="has no checkpoint '7'; there are: best, last, 2, 4"):
        open_model(run, "cpu", checkpoint=7)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_model(tmp_path / "nowhere", "cpu")
