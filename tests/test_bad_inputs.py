"""Bad inputs to commands and public functions: exit code 2 or a ValueError, one sentence, nothing left behind."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from bad_inputs.calls import Place, calls
from bad_inputs.commands import GENERATE, TRAIN, commands

import phasor
from phasor.cli import main

COMMANDS, CALLS = commands(), calls()
SAMPLE = 130  # of each, in the quick tests


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model folder, a run, and files and folders that are neither."""
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.ModelConfig(vocab_size=61, dim=16, num_layers=1, num_heads=2, position="rotary"))
    phasor.save(model, folder / "model")
    (folder / "text.txt").write_text("".join(f"some text to train on, line {i}\n" for i in range(60)))
    (folder / "file").write_text("x")
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("years of work")
    (folder / "out").mkdir()
    recipe = phasor.Recipe.from_dict(
        {
            "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 32},
            "data": {
                "train": str(folder / "text.txt"),
                "document": "line",
                "tokenizer": "bytes",
                "sequence_length": 16,
            },
            "train": {"steps": 1, "batch_tokens": 16, "device": "cpu"},
            "out": str(folder / "run"),
        }
    )
    phasor.train(recipe)
    names = ("model", "run", "file", "binary", "empty", "notes", "out")
    return {name: folder / name for name in names} | {"text": folder / "text.txt", "loaded": model.eval()}


def listing(place: Place) -> dict[str, int]:
    """Every file below the folder of the tests, with its size."""
    root = place["out"].parent
    files = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return {str(file): file.stat().st_size for file in files}


def fill_in(command: list[str], place: Place) -> list[str]:
    for key in ("model", "run", "file", "binary", "empty", "notes", "out", "text"):
        command = [part.replace(f"{{{key}}}", str(place[key])) for part in command]
    return command


def check_command(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(place)
    code = main(fill_in(COMMANDS[name], place))
    out, error = capsys.readouterr()
    assert (code, out) == (2, ""), (out, error)
    assert error.startswith("phasor: ")
    assert error.count("\n") == 1
    assert len(error) < 1200
    assert listing(place) == before


def check_call(place: Place, name: str) -> None:
    before = listing(place)
    with pytest.raises((ValueError, OSError)) as error:
        CALLS[name](place)
    text = str(error.value)
    assert type(error.value) is not UnicodeEncodeError
    assert text.strip()
    assert "\n" not in text
    assert len(text) < 1200
    assert listing(place) == before


def split(names: dict[str, object], seed: int) -> list[object]:
    """Every name, those beyond a sample marked slow."""
    quick = set(random.Random(seed).sample(list(names), SAMPLE))
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.sample(90)
@pytest.mark.parametrize("name", split(COMMANDS, 0))
def test_a_bad_command(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_command(place, name, capsys)


@pytest.mark.parametrize("name", split(CALLS, 1))
def test_a_bad_call(place: Place, name: str) -> None:
    check_call(place, name)


@pytest.mark.parametrize("command", [TRAIN, GENERATE], ids=["train", "generate"])
def test_what_the_mistakes_are_added_to_is_right(place: Place, command: list[str], tmp_path: Path) -> None:
    assert main(fill_in(command, place | {"out": tmp_path})) == 0


def test_there_are_many() -> None:
    assert len(COMMANDS) + len(CALLS) >= 500
