"""Files and folders: whole after a crash at any moment, with the modes of the umask, and without locks too."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import CrashRecorder, Tree, write_tree
from decoding import speaker

import phasor
from phasor import files
from phasor.artifacts import ArtifactFolder
from phasor.config.recipe import DataConfig, Recipe
from phasor.data.store import load_prepared_data, prepare
from phasor.files import atomic_write, lock, lock_folder
from phasor.training.state import load_newest, save_state


def states_of(folder: Path, code: Any, tmp_path: Path) -> list[tuple[Tree, Path]]:
    """The states that crashes leave, written to separate folders."""
    found = []
    for number, tree in enumerate(CrashRecorder(folder).run(code)):
        place = tmp_path / f"crash-{number}"
        place.mkdir()
        list(write_tree(tree, place))
        found.append((tree, place))
    return found


@pytest.fixture(params=["exchange", "rename"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, on a system that can exchange names and on one that cannot."""
    if request.param == "rename":
        monkeypatch.setattr(files, "exchange", lambda *_: False)
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_a_crash_while_a_model_is_saved_leaves_the_old_one_or_the_new_one(folder: Path, tmp_path: Path) -> None:
    before, after = (speaker(seed=seed, num_layers=1) for seed in (1, 2))
    phasor.save(before, folder / "model")
    seen = set()
    states = states_of(folder, lambda: phasor.save(after, folder / "model"), tmp_path)
    assert len(states) > 10
    for number, (_, place) in enumerate(states):
        found = phasor.load(place / "model")
        which = [torch.equal(found.tokens.weight, m.tokens.weight) for m in (before, after)]
        assert sorted(which) == [False, True]
        seen.add(which.index(True))
        if number % 4 == 3:
            phasor.save(after, place / "model")  # which removes what the crash left
            assert os.listdir(place) == ["model"]
    assert seen == {0, 1}
    assert torch.equal(phasor.load(states[-1][1] / "model").tokens.weight, after.tokens.weight)


def test_a_crash_while_the_first_model_is_saved_leaves_none_or_a_whole_one(folder: Path, tmp_path: Path) -> None:
    model = speaker(num_layers=1)
    states = states_of(folder, lambda: phasor.save(model, folder / "model"), tmp_path)
    there = [(place / "model").exists() for _, place in states]
    assert there[0] is False
    assert there[-1] is True
    for (_, place), exists in zip(states, there, strict=True):
        if exists:
            assert torch.equal(phasor.load(place / "model").tokens.weight, model.tokens.weight)


def test_a_crash_while_a_file_is_written_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    file = tmp_path / "work" / "recipe.json"
    file.write_text("old")

    def write() -> None:
        with atomic_write(file) as staged:
            staged.write_text("new")

    contents = [tree["recipe.json"] for tree, _ in states_of(tmp_path / "work", write, tmp_path)]
    assert contents[0] == b"old"
    assert contents[-1] == b"new"
    assert set(contents) == {b"old", b"new"}


def test_a_crash_while_a_checkpoint_is_saved_leaves_the_one_before_it(folder: Path, tmp_path: Path) -> None:
    save_state(folder, 1, {"model": {"weight": torch.ones(3)}}, {})
    states = states_of(folder, lambda: save_state(folder, 2, {"model": {"weight": torch.zeros(3)}}, {}), tmp_path)
    newest = [load_newest(place).step for _, place in states]
    assert newest[0] == 1
    assert newest[-1] == 2
    assert set(newest) == {1, 2}


def test_a_crash_while_data_are_prepared_again_leaves_the_old_ones_or_the_new_ones(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(40)))
    data = DataConfig(train=str(tmp_path / "corpus.txt"), tokenizer="bytes", document="line", validation_fraction=0.2)
    first = prepare(Recipe(data=data), folder / "data")
    other = Recipe(data=data.replace(validation_fraction=0.4))
    states = states_of(folder, lambda: prepare(other, folder / "data"), tmp_path)
    prints = []
    for _, place in states:
        ArtifactFolder(place / "data").restore()
        prints.append(load_prepared_data(place / "data").fingerprint)
    assert prints[0] == first.fingerprint
    assert prints[-1] == prepare(other, folder / "data").fingerprint != prints[0]
    assert set(prints) == {prints[0], prints[-1]}


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_modes_follow_the_umask(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        phasor.save(speaker(num_layers=1), tmp_path / "model")
        save_state(tmp_path / "checkpoints", 1, {"model": {"weight": torch.ones(3)}}, {})
        with atomic_write(tmp_path / "notes.txt") as staged:
            staged.unlink()
            os.close(os.open(staged, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    code = "import os, sys; from phasor.files import lock; lock(os.open(sys.argv[1], os.O_RDWR))"
    file = tmp_path / ".lock"
    handle = os.open(file, os.O_RDWR | os.O_CREAT)
    assert lock(handle)
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr
    os.close(handle)
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def test_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written as elsewhere; only what a kill left stays, since nobody knows whether it is in use."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    (tmp_path / ".model-1.part").mkdir()
    with (tmp_path / "file").open("wb") as file:
        assert not lock(file.fileno())
    phasor.save(speaker(num_layers=1), tmp_path / "model")
    phasor.save(speaker(num_layers=1), tmp_path / "model")
    with pytest.raises(OSError, match=r"[Ll]ock"), lock_folder(tmp_path, wait=False):
        pass
    assert sorted(os.listdir(tmp_path)) == [".model-1.part", "file", "model"]


def test_what_killed_processes_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    for name in (f".model-{'1' * 12}.part", f".model-{'2' * 12}.old", f".models-{'1' * 12}.part", ".model-mine.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "model").mkdir()
    model = ArtifactFolder(tmp_path / "model")
    with model.stage() as mine, model.stage() as other:
        assert mine.is_dir()
        (other / "file").write_text("new")
        model.publish(other)
    assert sorted(os.listdir(tmp_path)) == [".model-mine.part", f".models-{'1' * 12}.part", "model"]
    assert os.listdir(tmp_path / "model") == ["file"]


def test_a_link_is_replaced_and_not_what_it_points_to(folder: Path) -> None:
    (folder / "target").mkdir()
    (folder / "target" / "thesis").write_text("years")
    (folder / "link").symlink_to(folder / "target")
    link = ArtifactFolder(folder / "link")
    with link.stage() as staged:
        link.publish(staged)
    assert sorted(os.listdir(folder)) == ["link", "target"]
    assert not (folder / "link").is_symlink()
    assert (folder / "target" / "thesis").read_text() == "years"


@pytest.mark.parametrize("write", ["file", "folder"])
def test_a_full_disk_names_what_could_not_be_written(tmp_path: Path, write: str) -> None:
    place = tmp_path / "place"
    with (
        pytest.raises(OSError, match=re.escape(f"No space left on device: '{place}'")),
        atomic_write(place) if write == "file" else ArtifactFolder(place, "model").replace(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a name, as streams raise it
    assert not list(tmp_path.iterdir())
