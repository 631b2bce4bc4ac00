"""Flipped bits anywhere in a run folder: each is found and named, or changes nothing that is read."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_points
import pytest
import torch
from safetensors.torch import load_file

import phasor
from phasor.data.store import load_prepared_data
from phasor.manifest import MANIFEST, DamagedError, Manifest
from phasor.training.loop import train
from phasor.training.progress import TrainingProgress
from phasor.training.state import load_newest

FLIPS = 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended; it is left as it is found."""
    folder = tmp_path_factory.mktemp("flips")
    kill_points.write_texts(folder)
    train(kill_points.recipe("language", folder, "run"), False, TrainingProgress())
    assert not any(report.wrong for report in phasor.verify(folder / "run"))
    return folder / "run"


def choose(run: Path, number: int) -> tuple[Path, int, int]:
    """A file of the run, a byte of it, and a bit: half of them by file, half by byte."""
    draw = random.Random(number)
    files = sorted(file for file in run.rglob("*") if file.is_file() and file.stat().st_size)
    weights = [file.stat().st_size for file in files] if number % 2 else None
    file = draw.choices(files, weights)[0]
    return file, draw.randrange(file.stat().st_size), 1 << draw.randrange(8)


def flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= bit
    file.write_bytes(content)


def says_the_same(folder: Path, before: Any) -> bool:
    """Whether a manifest says what it said, as after a flip in the space between its words."""
    try:
        return Manifest.read(folder) == before
    except DamagedError:
        return False


def check(run: Path, number: int) -> None:
    file, position, bit = choose(run, number)
    content = file.read_bytes()
    before = Manifest.read(file.parent) if file.name == MANIFEST else None
    flip(file, position, bit)
    try:
        if before is not None and says_the_same(file.parent, before):
            assert not any(report.wrong for report in phasor.verify(run))
            return
        wrong = [report.folder / name for report in phasor.verify(run) for name, _ in report.wrong]
        assert wrong, (file, position, bit)
        assert before is not None or wrong == [file]
        check_reader(run, file)
    finally:
        file.write_bytes(content)


def check_reader(run: Path, file: Path) -> None:
    """What reads a damaged file says so, or takes another one in its place."""
    part = file.relative_to(run).parts[0]
    if part in ("model", "data"):
        read = phasor.load if part == "model" else load_prepared_data
        if file.name == MANIFEST:  # all else is as it was: what it says may be refused, or not be looked at
            with contextlib.suppress(DamagedError):
                read(run / part)
        else:
            with pytest.raises(DamagedError, match=file.name):
                read(run / part)
    elif part == "checkpoints":
        said: list[str] = []
        found = load_newest(run / "checkpoints", said.append)
        assert found is not None
        assert file.parent != found.folder
        assert len(said) == (file.parent.name > found.folder.name)


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_flips_are_found(run: Path, start: int) -> None:
    for number in range(start, start + 20):
        check(run, number)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, FLIPS, 20))
def test_a_thousand_flips_are_found(run: Path, start: int) -> None:
    for number in range(start, start + 20):
        check(run, number)


def resume_after(damage: Callable[[Path], None], run: Path, backup: Path) -> list[str]:
    """Resume a run after some damage, and what it says; its weights are the same, and all is put back."""
    expected, said = load_file(run / "model" / "model.safetensors"), []
    shutil.copytree(run, backup)
    progress = TrainingProgress()
    progress.on_message = said.append  # type: ignore[method-assign]
    try:
        damage(run)
        train(kill_points.recipe("language", run.parent, run.name), True, progress)
        found = load_file(run / "model" / "model.safetensors")
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    finally:
        shutil.rmtree(run)
        shutil.copytree(backup, run)
    return said


@pytest.mark.parametrize("name", ["train.0.tokens", "train.0.ends"])
@pytest.mark.parametrize("how", ["zeros", "flip"])
def test_a_resumed_run_notices_damaged_tokens(run: Path, tmp_path: Path, name: str, how: str) -> None:
    def damage(folder: Path) -> None:
        file = folder / "data" / name
        if how == "zeros":
            file.write_bytes(bytes(file.stat().st_size))
        else:
            flip(file, file.stat().st_size // 2 + 7, 64)
        flip(folder / "checkpoints" / "step-00000004" / "model.safetensors", 300, 1)

    said = resume_after(damage, run, tmp_path / "backup")
    assert any(f"{name} is not what was written" in line for line in said)
    assert any("step-00000004 is damaged and is passed over" in line for line in said)
