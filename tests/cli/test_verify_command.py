"""`phasor verify`: every file that is not as it was written is named, and what phasor did not write is said."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from commands import CommandRunner
from decoding import speaker

import phasor
from phasor.config.recipe import DataConfig, Recipe
from phasor.data.store import prepare
from phasor.manifest import MANIFEST
from phasor.training.state import save_state


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The artifacts of a run, in its folder."""
    folder = tmp_path / "run"
    phasor.save(speaker(num_layers=1), folder / "model")
    (tmp_path / "corpus.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(40)))
    data = DataConfig(train=str(tmp_path / "corpus.txt"), tokenizer="bytes", document="line", validation_fraction=0.2)
    prepare(Recipe(data=data), folder / "data")
    for step in (1, 2):
        save_state(folder / "checkpoints", step, {"model": {"weight": torch.ones(3)}}, {})
    return folder


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_what_is_as_it_was_written(run: Path, run_phasor: CommandRunner) -> None:
    lines = run_phasor("verify", str(run)).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(str(run / name) for name in ("data", "checkpoints/step-00000001", "checkpoints/step-00000002", "model"))
    ]
    assert all("files as they were written" in line for line in lines)
    for part in ("data", "checkpoints/step-00000001", "model"):
        assert len(run_phasor("verify", str(run / part)).splitlines()) == 1


@pytest.mark.parametrize(
    "name",
    ["data/train.0.tokens", "data/valid.0.ends", "model/model.safetensors", "checkpoints/step-00000002/state.json"],
)
def test_every_damaged_file_is_named(run: Path, run_phasor: CommandRunner, name: str) -> None:
    damage(run / name)
    found = json.loads(run_phasor("verify", str(run), "--json", code=1))
    wrong = [[f"{part['folder']}/{file}", what] for part in found["artifacts"] for file, what in part["wrong"]]
    assert wrong == [[str(run / name), "is not what was written, by its SHA-256"]]
    (run / name).unlink()
    assert f"{run / name} is missing" in run_phasor("verify", str(run), code=1)


def test_a_damaged_manifest_and_a_missing_one(run: Path, run_phasor: CommandRunner) -> None:
    (run / "model" / MANIFEST).write_text("{")
    assert f"{run / 'model' / MANIFEST} is damaged" in run_phasor("verify", str(run), code=1)
    (run / "run.json").write_text("{}")
    (run / "model" / MANIFEST).unlink()
    assert f"{run / 'model' / MANIFEST} is missing" in run_phasor("verify", str(run), code=1)


def test_a_change_that_is_accepted(run: Path, run_phasor: CommandRunner) -> None:
    file = run / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    (run / "model" / "tokenizer_config.json").write_text("{}")
    assert "config.json has" in run_phasor("verify", str(run / "model"), code=1)
    assert "4 files as they were written" in run_phasor("verify", "--accept", str(run / "model"))
    phasor.load(run / "model")
    assert "is not a model folder that phasor wrote" in run_phasor.expect_error("verify", "--accept", str(run / "data"))


def test_what_phasor_did_not_write(tmp_path: Path, run_phasor: CommandRunner) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "was not written by phasor" in run_phasor.expect_error("verify", str(tmp_path))
    assert "is not a folder" in run_phasor.expect_error("verify", str(tmp_path / "config.json"))
    assert "is not a model folder" in run_phasor.expect_error("verify", "--accept", str(tmp_path))


def test_what_cannot_be_read_is_not_taken_for_whole(
    run: Path, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "run.json").write_text("{}")
    listed, opened = os.listdir, Path.open

    def refuse(path: object) -> None:
        if "checkpoints" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", lambda path: refuse(path) or listed(path))
    monkeypatch.setattr(Path, "open", lambda path, *given, **named: refuse(path) or opened(path, *given, **named))
    said = run_phasor("verify", str(run), code=1)
    assert f"{run / 'checkpoints' / MANIFEST} cannot be read: Permission denied" in said


def test_a_folder_that_cannot_be_searched_is_not_called_foreign(
    run: Path, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "lstat", refuse)
    assert f"phasor: {run / MANIFEST}: Permission denied" in run_phasor.expect_error("verify", str(run))
