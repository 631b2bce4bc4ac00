"""Loggers: what each is told of a run, packages that are missing, and errors, which do not end a run."""

import json
import sys
from types import ModuleType

import pytest
from training_runs import Notes, StopAt, recipe, stand_in

from phasor.training import loop
from phasor.training.loggers import LOGGERS
from phasor.training.loggers.wandb import last_id


class Kept:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.told, self.logged, self.finished = [], {}, 0

    def on_start(self, run):
        self.told.append(run)

    def log(self, step, values):
        self.logged.setdefault(step, {}).update(values)

    def finish(self):
        self.finished += 1


def train(recipe, *loggers, monkeypatch, notes=None, **how):
    monkeypatch.setattr(loop, "load_datasets", lambda *given: stand_in(*given))
    return loop.train(recipe, progress=notes or Notes(), loggers=loggers, **how)


def numbers(folder):
    """The numbers of metrics.jsonl by step."""
    found = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        found.setdefault(step, {}).update(line)
    return found


def test_a_callback_gets_what_metrics_have(tmp_path, monkeypatch):
    logger, made = Kept(), recipe(tmp_path, train__steps=5)
    train(made, logger, monkeypatch=monkeypatch)
    assert logger.logged == numbers(tmp_path)
    assert [(told.folder, told.recipe, told.step) for told in logger.told] == [(tmp_path, made, 0)]
    assert logger.finished == 1


def test_a_run_that_is_resumed_starts_its_loggers_at_its_checkpoint(tmp_path, monkeypatch):
    made, logger = recipe(tmp_path), Kept()
    train(made, Kept(), monkeypatch=monkeypatch, notes=Notes(each=StopAt(5)))
    train(made, logger, monkeypatch=monkeypatch, resume=True)
    assert logger.told[0].step == 5
    assert min(logger.logged) == 6
    assert logger.finished == 1


@pytest.mark.parametrize("broken", ["on_start", "log", "finish"])
def test_a_logger_that_fails_ends_no_run(broken, tmp_path, monkeypatch):
    logger, other, notes = Kept(), Kept(), Notes()

    def fail(*_):
        raise RuntimeError("the server is gone")

    setattr(logger, broken, fail)
    result = train(recipe(tmp_path, train__steps=3), logger, other, monkeypatch=monkeypatch, notes=notes)
    assert result.status == "finished"
    assert other.logged == numbers(tmp_path)
    assert [line for line in notes.said if "logs" in line] == ["Kept logs no more: RuntimeError: the server is gone"]


def test_a_package_that_is_missing_is_one_sentence(tmp_path, monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=f"the logger {name} needs the package {name}: pip install"):
            train(recipe(tmp_path, loggers=[name]), monkeypatch=monkeypatch)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes = Notes()
    assert train(recipe(tmp_path, train__steps=2), monkeypatch=monkeypatch, notes=notes).status == "finished"
    assert any("events need the package tensorboard" in line for line in notes.said)
    assert not (tmp_path / "events").exists()


def test_no_logger_leaves_no_events(tmp_path, monkeypatch):
    train(recipe(tmp_path, train__steps=2, loggers=[]), monkeypatch=monkeypatch)
    assert not (tmp_path / "events").exists()


BLOCK, HEADER = 32768, 7  # of LevelDB's log format, in which wandb writes its records


def wandb_records(file):
    """The records of a file of wandb, one after another, put together from their parts."""
    data, place, record = file.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # too short for a header: the rest of a block is empty
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # the whole, or its last part
            yield record
            record = b""


def test_wandb_keeps_its_run(tmp_path, monkeypatch):
    """Offline, by the package itself."""
    from wandb.proto import wandb_internal_pb2

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "tests"}.items():
        monkeypatch.setenv(name, value)
    made = recipe(tmp_path / "run", loggers=["wandb"], train__steps=4)
    train(made, monkeypatch=monkeypatch, notes=Notes(each=StopAt(2)))
    first = last_id(tmp_path / "run" / "wandb")
    train(made, monkeypatch=monkeypatch, resume=True)
    assert last_id(tmp_path / "run" / "wandb") == first
    steps = {}
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.project:
                assert (record.run.project, record.run.run_id, record.run.display_name) == ("tests", first, "run")
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "step" in items:
                steps.setdefault(items["step"], {}).update(items)
    expected = numbers(tmp_path / "run")
    assert {step: {name: found[name] for name in expected[step]} for step, found in steps.items()} == expected


def test_trackio_is_called_as_it_documents(tmp_path, monkeypatch):
    calls = []
    fake = ModuleType("trackio")
    fake.init = lambda **options: calls.append(("init", options))
    fake.log = lambda values, step: calls.append(("log", step, values))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    made = recipe(tmp_path / "run", loggers=["trackio"], train__steps=3)
    train(made, monkeypatch=monkeypatch)
    options = {"project": "phasor", "name": "run", "config": made.to_dict(), "resume": "never"}
    assert calls[0] == ("init", options)
    logged = {}
    for _, step, values in calls[1:-1]:
        logged.setdefault(step, {}).update(values)
    assert logged == numbers(tmp_path / "run")
    assert calls[-1] == ("finish",)


def test_every_logger_of_a_recipe_has_a_class():
    import typing

    from phasor.config.recipe import LoggerName

    assert set(LOGGERS) == set(typing.get_args(LoggerName))
