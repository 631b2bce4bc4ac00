"""Folders of the command line: by number, what is inside of them, and no link out of them."""

import os

import pytest

from phasor.lab.endpoints import FieldError
from phasor.lab.folders import Folders


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_models_runs_and_reports_inside_have_numbers_that_stay(tmp_path):
    write(tmp_path / "runs" / "lm-2", run="{}")
    write(tmp_path / "runs" / "lm-2" / "checkpoints" / "step-1", config="{}")
    write(tmp_path / "runs" / "lm-2" / "report", lengths="{}")
    write(tmp_path / "runs" / "notes", other="{}")
    model = write(tmp_path / "model", config="{}")
    (model / "model.safetensors").touch()
    folders = Folders([tmp_path / "runs", tmp_path / "model"])
    names = [folder.name for folder in folders.list()]
    assert names == ["runs", "model", "runs/lm-2", "runs/lm-2/report"]
    write(tmp_path / "runs" / "lm-1", run="{}")
    assert [folder.name for folder in folders.list()] == [*names, "runs/lm-1"]
    assert folders.get(2).is_run
    assert folders.get(2).is_model
    assert not folders.get(2).is_report
    assert folders.get(1).is_model
    assert not folders.get(1).is_run
    assert folders.get(3).is_report


def test_a_folder_that_is_given_twice_is_listed_once(tmp_path):
    assert Folders([write(tmp_path / "a"), tmp_path / "a"]).names == ["a"]


def test_no_more_than_500_folders_are_found_inside_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr("phasor.lab.folders.MOST", 5)
    for outer in range(4):
        for inner in range(4):
            write(tmp_path / "runs" / str(outer) / str(inner), run="{}")
    assert len(Folders([tmp_path / "runs"]).list()) == 6


@pytest.mark.parametrize("number", [-1, 2])
def test_another_number_is_refused(tmp_path, number):
    folders = Folders([write(tmp_path / "a"), write(tmp_path / "b")])
    with pytest.raises(FieldError, match=f"there is no folder {number}; there are 0 to 1") as caught:
        folders.get(number, "run")
    assert caught.value.field == "run"


def test_without_folders_the_sentence_says_how_to_give_one():
    with pytest.raises(FieldError, match="there are none: give one, as in phasor lab FOLDER"):
        Folders().get(0)


def test_what_is_not_a_folder_is_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="file is a file, and not a folder"):
        Folders([file])
    with pytest.raises(ValueError, match="missing does not exist"):
        Folders([tmp_path / "missing"])


def test_links_out_of_a_folder_are_refused(tmp_path):
    outside = write(tmp_path / "outside", config="{}", run="{}", lengths="{}")
    (outside / "model.safetensors").touch()
    given = write(tmp_path / "given")
    (given / "linked").symlink_to(outside)
    (given / "lengths.json").symlink_to(outside / "lengths.json")
    inner = write(given / "inner", config="{}")
    (inner / "model.safetensors").symlink_to(os.path.relpath(outside / "model.safetensors", inner))
    folders = Folders([given])
    assert [folder.name for folder in folders.list()] == ["given"]
    with pytest.raises(ValueError, match=r"given/lengths\.json is a link out of the folder, and is not read"):
        folders.get(0).file("lengths.json")
    with pytest.raises(ValueError, match="link out of the folder"):
        folders.get(0).file("..", "outside", "config.json")
    with pytest.raises(ValueError, match="given/linked is a link out"):
        folders.get(0).check_links(given)


def test_links_that_stay_inside_are_read(tmp_path):
    given = write(tmp_path / "given", config="{}")
    (given / "blob").write_text("weights")
    (given / "model.safetensors").symlink_to("blob")
    folder = Folders([given]).get(0)
    folder.check_links(given)
    assert folder.is_model


def test_a_snapshot_of_the_hub_cache_is_read(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    blobs = write(tmp_path / "models--a--b" / "blobs", one="{}")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(os.path.relpath(blobs / "one.json", snapshot))
    for given in (snapshot, tmp_path / "models--a--b"):
        folder = Folders([given]).get(0)
        folder.check_links(given)
        assert folder.is_model
