"""Run folders: what somebody else wrote loses no byte, and what cannot be read is not taken for damaged."""

import errno
import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from training_runs import Notes, StopAt, recipe, run

from phasor.checkpoints.runs import MARKER, RunMarker
from phasor.cli import main
from phasor.training import state
from phasor.training.run import FILES, FOLDERS
from phasor.training.state import UnreadableError, checkpoints, load_newest, prune, save_state

TEXT = "".join(f"one line and {number} more of them\n" for number in range(60))
SIZES = "--model.dim 16 --model.num-heads 2 --model.num-layers 1 --model.hidden-dim 24 --data.sequence-length 48"
HOW = "--data.tokenizer bytes --data.document line --train.batch-tokens 96 --train.device cpu --train.steps 1"
SMALL = [*SIZES.split(), *HOW.split(), "--schedule.warmup", "0"]
NAMES = [
    *FILES,
    *FOLDERS,
    MARKER,
    *("manifest.json", "data.json", "train.0.tokens", "config.json", "model.safetensors"),
    *(
        "step-00000001",
        "damaged-step-00000001",
        "events.out.tfevents.1",
        ".model-0123456789ab.part",
        ".recipe.json.part",
    ),
    *(".data-0123456789ab.old", ".run.json-7.part", "runs", "lm-1", "labels.csv", "0123456789abcdef"),
]


def plant(folder: Path, outside: Path, draw: random.Random, depth: int = 0) -> None:
    """A random tree of somebody else's files, folders and links, with names that are also ours."""
    for name in draw.sample(sorted(set(NAMES)), draw.randint(1, 6)):
        path, kind = folder / name, draw.random()
        if kind < 0.5 or depth == 3:
            path.write_text(draw.choice(["", "{}", "mine", '{"phasor": "run"}', '{"step": 1, "loss": null}\n']))
        elif kind < 0.85:
            path.mkdir()
            plant(path, outside, draw, depth + 1)
        else:
            path.symlink_to(
                draw.choice([outside, outside / "labels.csv", outside / "nowhere", Path(draw.choice(NAMES))])
            )


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder: the bytes of files, the targets of links, None for folders."""
    found: dict[str, bytes | str | None] = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            found[str(path)] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def lost(before: dict[str, bytes | str | None], folder: Path) -> list[str]:
    now = contents(folder)
    return [path for path, content in before.items() if path not in now or now[path] != content]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def train(*arguments: str) -> int:
    return main(["train", "--data.train", "../corpus.txt", *SMALL, *arguments])


def check_tree(place: Path, seed: int) -> None:
    draw = random.Random(seed)
    home, outside = place / f"home-{seed}", place / f"outside-{seed}"
    home.mkdir()
    outside.mkdir()
    (outside / "labels.csv").write_text("a,b")
    plant(home, outside, draw)
    folders = [
        os.path.relpath(path, home) for path, content in contents(home).items() if not isinstance(content, bytes)
    ]
    before = contents(place)
    os.chdir(home)
    for _ in range(3):
        where = draw.choice([".", *folders, "fresh"])
        how = draw.choice([[], ["--resume"], ["--overwrite"]])
        cache = ["--data.cache", draw.choice([".", *folders])] if draw.random() < 0.3 else []
        train("--out", where, *how, *cache)
        assert not lost(before, place), (where, how, cache)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_a_foreign_tree_loses_no_byte(place, seed, capsys):
    check_tree(place, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 400))
def test_no_foreign_tree_loses_a_byte(place, seed, capsys):
    check_tree(place, seed)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, MARKER, "data-link"])
def test_what_others_put_into_a_run_is_refused_before_the_first_step(place, name, capsys):
    """In a folder that holds no run, and in one that a run was stopped in."""
    inside = place / "outside"
    inside.mkdir()
    (inside / "labels.csv").write_text("mine")
    for prepared in (False, True):
        out = place / f"run-{prepared}"
        out.mkdir()
        if prepared:
            RunMarker.create(out, recipe(out))
        path = out / name.removesuffix("-link")
        if name in (*FILES, MARKER):
            path.write_text("mine")
        elif name in FOLDERS:
            shutil.copytree(inside, path)
        else:
            path.symlink_to(inside)
        before = contents(place)
        for how in ([], ["--resume"], ["--overwrite"]):
            assert main(["train", "--data.train", "corpus.txt", *SMALL, "--out", str(out), *how]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert any(word in error for word in ("was not written by", "holds a run already", "no run to resume"))
        assert contents(place) == before


def test_the_report_of_lost_files(place, capsys):
    """What once emptied a folder: `--out .` beside a folder of data with its own manifest."""
    data = place / "data"
    data.mkdir()
    for name in ("manifest.json", "corpus.txt", "labels.csv"):
        (data / name).write_text(TEXT)
    before = contents(place)
    assert main(["train", "--data.train", "data/corpus.txt", *SMALL, "--out", "."]) == 2
    assert "give a new or empty folder" in capsys.readouterr().err
    assert contents(place) == before


@pytest.mark.parametrize("how", [[], ["--resume"], ["--overwrite"]])
def test_the_model_one_starts_from_is_never_replaced(place, how, capsys):
    assert main(["train", "--data.train", "corpus.txt", *SMALL, "--out", "first"]) == 0
    for out in ("first", "exp"):
        shutil.copytree(place / "first" / "model", place / "exp" / "model", dirs_exist_ok=True)
        before = contents(place / out / "model")
        start = ["--data.train", "corpus.txt", "--init-from", f"{out}/model", *SMALL]
        assert main(["train", *start, "--out", out, *how]) == 2
        assert contents(place / out / "model") == before


def test_overwriting_starts_over_and_keeps_what_is_not_the_runs(place, capsys):
    arguments = ["train", "--data.train", "corpus.txt", *SMALL, "--out", "run"]
    assert main([*arguments, "--train.steps", "3"]) == 0
    (place / "run" / "notes.txt").write_text("mine")
    (place / "run" / "checkpoints" / "step-00000002").mkdir()
    (place / "run" / "checkpoints" / "step-00000002" / "mine").write_text("mine")
    assert main(arguments) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert (place / "run" / "notes.txt").read_text() == "mine"
    names = {path.name for path in (place / "run" / "checkpoints").iterdir()}
    assert names == {"step-00000001", "damaged-step-00000002"}
    assert (place / "run" / "checkpoints" / "damaged-step-00000002" / "mine").read_text() == "mine"


def test_there_must_be_a_run_to_resume(place, capsys):
    for arguments in (["--out", "typo"], [], ["--out", "corpus"], ["--task", "mlm"]):
        assert main(["train", "--resume", *arguments]) == 2
        said = capsys.readouterr().err
        assert "to resume" in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in place.iterdir()) == ["corpus.txt"]


UNREADABLE = [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE]


@pytest.mark.parametrize("number", UNREADABLE, ids=[errno.errorcode[number] for number in UNREADABLE])
@pytest.mark.parametrize("name", ["manifest", "model.safetensors", "state.json"])
def test_what_cannot_be_read_is_not_taken_for_damaged(tmp_path, monkeypatch, number, name):
    run(recipe(tmp_path / "run", train__steps=4), notes=Notes(StopAt(3)))
    before, opened = contents(tmp_path), io.open

    def fail(file, *given, **named):
        if "checkpoints" in str(file) and name in str(file):
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, *given, **named)

    with monkeypatch.context() as patch:
        for module in ("builtins", "io"):
            patch.setattr(f"{module}.open", fail)
        with pytest.raises(OSError, match="cannot be read") as error:
            run(recipe(tmp_path / "run", train__steps=4), resume=True)
        assert os.strerror(number) in str(error.value)
        prune(tmp_path / "run" / "checkpoints", keep=1)
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_checkpoint_without_permission_is_not_replaced(tmp_path):
    run(recipe(tmp_path / "run", train__steps=4), notes=Notes(StopAt(3)))
    files = list((tmp_path / "run" / "checkpoints").glob("*/*manifest*"))
    for file in files:
        file.chmod(0)
    with pytest.raises(UnreadableError):
        run(recipe(tmp_path / "run", train__steps=4), resume=True)
    for file in files:
        file.chmod(0o644)
    assert load_newest(tmp_path / "run" / "checkpoints").step == 3


def test_one_never_starts_over_where_all_checkpoints_are_damaged(folder):
    run(recipe(folder, train__steps=4), notes=Notes(StopAt(3)))
    for _, each in checkpoints(folder / "checkpoints"):
        (each / "model.safetensors").write_bytes(b"")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* is whole.*overwriting"):
        run(recipe(folder, train__steps=4), resume=True)
    assert contents(folder) == before


def test_retention_keeps_what_is_not_a_checkpoint_of_ours(folder):
    for step in (1, 2, 3):
        save_state(folder, step, {}, {})
    (folder / "step-00000001" / "notes.txt").write_text("mine")
    (folder / "step-00000000").mkdir()
    (folder / "step-00000000" / "manifest.json").write_text("{}")
    prune(folder, keep=1)
    assert [step for step, _ in checkpoints(folder)] == [0, 1, 3]


def test_a_damaged_checkpoint_keeps_its_name_apart_from_an_earlier_one(folder):
    for _ in range(2):
        save_state(folder, 2, {}, {})
        state.rename_damaged_checkpoints(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["damaged-step-00000002", "damaged-step-00000002-2"]


def test_a_changed_recipe_is_recorded_and_said(folder):
    run(recipe(folder, train__steps=4), notes=Notes(StopAt(2)))
    assert [each["step"] for each in RunMarker.read(folder).recipes] == [0]
    notes = Notes()
    changes = {"optimizer__lr": 2e-2, "train__max_grad_norm": 0.5, "train__label_smoothing": 0.1}
    run(recipe(folder, train__steps=4, **changes), resume=True, notes=notes)
    said = next(line for line in notes.said if "recipe is another one" in line)
    recorded = RunMarker.read(folder).recipes
    assert [each["step"] for each in recorded] == [0, 2]
    for change in ("optimizer.lr was 0.01 and is 0.02", "train.max_grad_norm was 1.0 and is 0.5"):
        assert change in said
        assert change in recorded[1]["changes"]
    assert json.loads((folder / "recipe.json").read_text())["optimizer"]["lr"] == 2e-2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer__lr": 0.5}, r"optimizer\.lr was 0\.01 and is 0\.5"),
        ({"train__label_smoothing": 0.1}, r"train\.label_smoothing was 0\.0 and is 0\.1"),
        ({"schedule": {"kind": "constant"}}, r"schedule\.kind was \"cosine\" and is \"constant\""),
    ],
)
def test_a_finished_run_is_not_said_to_be_trained_otherwise(folder, changes, said):
    run(recipe(folder, train__steps=2))
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"has all of its 2 steps behind it.*{said}"):
        run(recipe(folder, train__steps=2, **changes), resume=True)
    assert contents(folder) == before
    run(recipe(folder, train__steps=2, train__log_every=3), resume=True)


def test_fewer_steps_than_done_are_refused(folder):
    run(recipe(folder, train__steps=4))
    before = contents(folder)
    with pytest.raises(ValueError, match="has 4 steps behind it, more than the 3 that are asked for"):
        run(recipe(folder, train__steps=3), resume=True)
    assert contents(folder) == before


MINE = [
    *(".model-backup.old/mine", ".data-mine.part", ".recipe.json.part", ".metrics.jsonl-2024.old", ".run.json-1.part"),
    *("checkpoints/.step-mine.old/mine", "checkpoints/.step-00000001.old/mine", "checkpoints/notes.txt"),
    *("events/notes.txt", "notes/model/mine"),
]


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_what_others_put_beside_the_files_of_a_run_stays(place, how, capsys):
    arguments = ["train", "--data.train", "corpus.txt", *SMALL, "--out", "run"]
    assert main(arguments) == 0
    for name in MINE:
        (place / "run" / name).parent.mkdir(exist_ok=True, parents=True)
        (place / "run" / name).write_text("mine")
    assert main([*arguments, "--train.steps", "2", how]) == 0
    assert [name for name in MINE if not (place / "run" / name).exists()] == []


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
@pytest.mark.parametrize("name", ["model/chat_template.jinja", "model/vocab.txt", "model/1_Pooling/config.json"])
def test_a_file_of_others_in_the_model_of_a_run_is_not_replaced(place, name, how, capsys):
    """Model folders have files of these names, and this one was written without them."""
    arguments = ["train", "--data.train", "corpus.txt", *SMALL, "--out", "run"]
    assert main(arguments) == 0
    (place / "run" / name).parent.mkdir(exist_ok=True)
    (place / "run" / name).write_text("mine")
    before = contents(place)
    assert main([*arguments, "--train.steps", "2", how]) == 2
    assert "holds more than a model" in capsys.readouterr().err
    assert contents(place) == before


def test_the_tokenizer_folder_of_a_fine_tune_keeps_what_others_put_there(place, capsys):
    assert main(["train", "--data.train", "corpus.txt", *SMALL, "--out", "first"]) == 0
    start = ["train", "--data.train", "corpus.txt", "--init-from", "first", "--data.sequence-length", "48"]
    start += [*HOW.split(), "--out", "run"]
    assert main(start) == 0
    (place / "run" / "tokenizer" / "notes.txt").write_text("mine")
    before = contents(place / "run")
    assert main([*start, "--overwrite"]) == 2
    assert "holds what no run wrote (notes.txt)" in capsys.readouterr().err
    assert contents(place / "run") == before


def test_a_run_without_its_checkpoints_keeps_its_model(folder):
    run(recipe(folder, train__steps=4))
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"has a model and no checkpoint to resume from.*init_from.*overwrite"):
        run(recipe(folder, train__steps=6), resume=True)
    assert contents(folder) == before


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_a_stopped_run_without_its_checkpoints_does_not_begin_again(folder, left):
    run(recipe(folder, save__every=100, train__evaluate_every=100), notes=Notes(each=StopAt(3)))
    shutil.rmtree(folder / "checkpoints")
    if left != "nothing":  # as where its disk is not mounted
        (folder / "checkpoints").mkdir()
    before = contents(folder)
    with pytest.raises(ValueError, match=r"a checkpoint of step 3 .*checkpoints holds none: bring it back.*overwrite"):
        run(recipe(folder), resume=True)
    assert contents(folder) == before
    assert RunMarker.read(folder).saved == 3


def test_metrics_prove_a_checkpoint_where_the_marker_names_none(folder):
    """As in runs from before checkpoints were recorded in the marker."""
    run(recipe(folder), notes=Notes(each=StopAt(3)))
    shutil.rmtree(folder / "checkpoints")
    RunMarker.read(folder).record_checkpoint(None)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"a checkpoint of step 2 .*checkpoints holds none: bring it back.*overwrite"):
        run(recipe(folder), resume=True)
    assert contents(folder) == before


def test_a_marker_that_is_no_longer_json_is_damaged_and_not_missing(folder, capsys):
    run(recipe(folder, train__steps=2))
    content = bytearray((folder / MARKER).read_bytes())
    for place in (len(content) // 2, len(content) - 2):
        (folder / MARKER).write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        for verb in (["train", "--resume", "--out"], ["generate"], ["evaluate"]):
            assert main([*verb, str(folder)]) == 2
            assert f"{MARKER} is damaged" in capsys.readouterr().err


def test_a_model_that_a_kill_left_under_its_hidden_name_is_put_back(folder):
    """Where names cannot be exchanged in one step, a kill may come between two."""
    run(recipe(folder, train__steps=2))
    before = contents(folder / "model")
    (folder / "model").rename(folder / ".model-0123456789ab.old")
    with pytest.raises(ValueError, match="2 steps behind it"):
        run(recipe(folder, train__steps=1), resume=True)
    assert contents(folder / "model") == before


def test_checkpoints_that_cannot_be_listed_are_not_overwritten(place, monkeypatch, capsys):
    arguments = ["train", "--data.train", "corpus.txt", *SMALL, "--out", "run"]
    assert main(arguments) == 0
    before, listed = contents(place), os.listdir

    def fail(path):
        if str(path).endswith("checkpoints"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        assert main([*arguments, "--overwrite"]) == 2
    assert "checkpoints cannot be read: Permission denied" in capsys.readouterr().err
    assert contents(place) == before


def test_events_that_cannot_be_read_do_not_end_a_run(folder, monkeypatch):
    run(recipe(folder, train__steps=2))
    opened = io.open

    def fail(file, mode="r", *given, **named):
        if "tfevents" in str(file) and "r" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, mode, *given, **named)

    notes = Notes()
    with monkeypatch.context() as patch:
        for module in ("builtins", "io"):
            patch.setattr(f"{module}.open", fail)
        assert run(recipe(folder, train__steps=4), resume=True, notes=notes).status == "finished"
    assert any("cannot be read: Permission denied; the run continues" in line for line in notes.said)


@pytest.mark.parametrize(("option", "said"), [("--out", "--out is not"), ("--data.train", "--data.train is not")])
def test_a_name_that_is_not_utf8_leaves_nothing(place, option, said, capsys):
    arguments = ["train", "--data.train", "corpus.txt", *SMALL, "--out", "run", option, "a\udcff"]
    assert main(arguments) == 2
    assert f"phasor: {said} UTF-8 text" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["corpus.txt"]


def test_markers_half_written_go_and_what_only_has_their_name_stays(tmp_path):
    run(recipe(tmp_path / "run", train__steps=2))
    marker = (tmp_path / "run" / MARKER).read_bytes()
    left = {"0123456789ab": marker[:50], "0123456789ac": marker[:5], "0123456789ad": b""}
    mine = {"0123456789ae": b"my notes", "0123456789af": b"{}"}
    for token, content in (left | mine).items():
        (tmp_path / "run" / f".{MARKER}-{token}.part").write_bytes(content)
    folder = tmp_path / "run" / f".{MARKER}-0123456789b0.part"
    folder.mkdir()
    run(recipe(tmp_path / "run", train__steps=4), resume=True)
    found = {path.name[-17:-5] for path in (tmp_path / "run").glob(f".{MARKER}-*.part")}
    assert found == {*mine, "0123456789b0"}


def test_the_plot_has_names_that_people_read(folder, monkeypatch):
    import matplotlib.figure

    labels, savefig = [], matplotlib.figure.Figure.savefig

    def note(self, *given, **how):
        labels.extend(text.get_text() for text in self.axes[0].get_legend().get_texts())
        savefig(self, *given, **how)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", note)
    run(recipe(folder, train__steps=4))
    assert labels == ["training loss", "validation loss"]
