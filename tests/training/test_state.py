"""Checkpoints: whole or not at all, checked when read, and never the last whole one deleted."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from phasor import files
from phasor.artifacts import ArtifactFolder
from phasor.manifest import MANIFEST
from phasor.training import state
from phasor.training.state import (
    checkpoints,
    describe_changes,
    load_newest,
    newest_intact,
    prune,
    rename_damaged_checkpoints,
    save_state,
)


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(7, 5, generator=generator), "half": torch.randn(3).bfloat16()},
        "optimizer": {"weight/step": torch.tensor(float(step)), "weight/exp_avg": torch.zeros(7, 5)},
    }


def save(folder, *steps):
    for step in steps:
        save_state(folder, step, tensors(step), {"best": 0.1 + step, "evaluated": step})


def steps(folder):
    return [step for step, _ in checkpoints(folder)]


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path):
    given = tensors(3)
    save_state(tmp_path, 3, given, {"best": 0.1, "nothing": None})
    found = load_newest(tmp_path)
    assert found.step == 3
    assert found.values == {"best": 0.1, "nothing": None}
    assert found.tensors.keys() == given.keys()
    for group, named in given.items():
        assert found.tensors[group].keys() == named.keys()
        for name, tensor in named.items():
            assert found.tensors[group][name].dtype == tensor.dtype
            assert torch.equal(found.tensors[group][name], tensor)


def test_nothing_is_pickled(tmp_path):
    save(tmp_path, 3)
    assert {file.suffix for file in (tmp_path / "step-00000003").iterdir()} == {".json", ".safetensors"}


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", MANIFEST])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "missing", "longer"])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, file, how):
    save(tmp_path, 2, 4)
    path = tmp_path / "step-00000004" / file
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        data[len(data) // 2] ^= 64
        path.write_bytes({"flip": data, "cut": data[:-3], "empty": b"", "longer": data + b" x"}[how])
    said = []
    assert load_newest(tmp_path, said.append).step == 2
    assert len(said) == 1
    assert str(tmp_path / "step-00000004") in said[0]
    if file != MANIFEST:
        assert file in said[0]


def test_every_flipped_bit_of_the_tensors_is_found(tmp_path):
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / "model.safetensors"
    data = path.read_bytes()
    for position in range(0, len(data), 37):
        for bit in (0, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            assert newest_intact(tmp_path) is None
    path.write_bytes(data)
    assert newest_intact(tmp_path)[0] == 2


def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(tmp_path):
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / MANIFEST
    data, meant = path.read_bytes(), json.loads(path.read_text())
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        if newest_intact(tmp_path) is not None:
            assert json.loads(path.read_text())["files"] == meant["files"]


def test_a_checkpoint_moved_to_another_step_is_not_taken_for_it(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")
    assert load_newest(tmp_path) is None


def test_all_damaged_is_none_at_all(tmp_path):
    save(tmp_path, 2, 4)
    for _, place in checkpoints(tmp_path):
        (place / MANIFEST).write_text("[]")
    said = []
    assert load_newest(tmp_path, said.append) is None
    assert len(said) == 2


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    save(tmp_path, *range(1, 8))
    prune(tmp_path, keep=2, best=3)
    assert steps(tmp_path) == [3, 6, 7]
    prune(tmp_path, keep=1, best=7)
    assert steps(tmp_path) == [7]


def test_retention_never_deletes_the_newest_whole_one(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    for step in (4, 5):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    prune(tmp_path, keep=1)
    assert steps(tmp_path) == [3, 5]
    assert load_newest(tmp_path).step == 3


def test_retention_deletes_nothing_where_none_is_whole(tmp_path):
    save(tmp_path, 1, 2, 3)
    for _, place in checkpoints(tmp_path):
        (place / "state.json").unlink()
    prune(tmp_path, keep=1)
    assert steps(tmp_path) == [1, 2, 3]


def test_damaged_ones_are_renamed_so_that_they_do_not_count(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "step-00000004" / "model.safetensors").write_bytes(b"")
    rename_damaged_checkpoints(tmp_path, 2)
    assert steps(tmp_path) == [2]
    assert (tmp_path / "damaged-step-00000004").is_dir()


def test_a_damaged_one_is_replaced_when_its_step_is_saved_again(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    save(tmp_path, 2)
    assert load_newest(tmp_path).step == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("at", ["save_file", "fsync", "publish", "write_json"])
@pytest.mark.parametrize("saved", [(), (2,)], ids=["first", "second"])
def test_a_full_disk_leaves_the_last_checkpoint_whole_and_says_so(tmp_path, monkeypatch, at, saved):
    save(tmp_path, *saved)

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr({"fsync": files, "publish": ArtifactFolder}.get(at, state), at, full)
    with pytest.raises(OSError, match=r"step 4 cannot be written.*No space left") as error:
        save(tmp_path, 4)
    monkeypatch.undo()
    assert ("step-00000002" if saved else "none") in str(error.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"step-{step:08d}" for step in saved]
    assert newest_intact(tmp_path) == ((2, tmp_path / "step-00000002") if saved else None)


def test_a_disk_that_takes_no_more_bytes(tmp_path):
    """The same with the system refusing the write, in a process that may write no file larger than 100 kB."""
    code = f"""
import resource, signal, torch
from pathlib import Path
from phasor.training.state import save_state
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for step, size in ((1, 100), (2, 100_000)):
    save_state(Path({str(tmp_path)!r}), step, {{"model": {{"weight": torch.ones(size)}}}}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "step 2 cannot be written" in done.stderr
    assert "the newest whole one is step-00000001" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000001"]
    assert load_newest(tmp_path).step == 1


def test_an_interruption_leaves_nothing_half_written(tmp_path, monkeypatch):
    save(tmp_path, 2)

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000002"]


def test_what_a_kill_left_behind_is_swept_away(tmp_path):
    save(tmp_path, 2)
    for name in (".step-00000004-0123456789ab.part", ".step-00000001-0123456789ab.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    ArtifactFolder(tmp_path).remove_leftovers("step-[0-9]*")
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000002"]


def test_changes_are_told_field_by_field():
    before = {"model": {"dim": 64, "layers": [1]}, "seed": 0, "gone": 1}
    now = {"model": {"dim": 128, "layers": [1]}, "seed": 0, "new": True}
    assert describe_changes(before, now) == [
        "model.dim was 64 and is 128",
        "gone was 1 and is null",
        "new was null and is true",
    ]
