"""The view "runs": curves of run folders while they grow, and reports of lengths."""

import json
import os
import re

import numpy
import pytest

import phasor
from phasor import ModelConfig, Transformer
from phasor.config.recipe import DataConfig, Recipe
from phasor.config.tasks import TASKS
from phasor.evaluation import evaluate_lengths
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.folders import Folders
from phasor.lab.views.runs import LIVE_SECONDS, TASK_NAMES, downsample
from phasor.training.build import model_config
from phasor.training.run import RunFolder


def answer(name, body, folders):
    return ENDPOINTS[f"/api/runs/{name}"].answer(body, folders)


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "runs" / "lm-1", Recipe(), resume=False) as folder:
        folder.start(0)
        yield folder


def test_curves_grow_while_a_run_trains(run, tmp_path):
    folders = Folders([tmp_path / "runs"])
    first = answer("curves", {}, folders)
    assert first["runs"][0]["name"] == "runs/lm-1"
    assert first["runs"][0]["curves"] == {}
    run.log(10, loss=3.5, lr=0.1)
    run.log(20, loss=2.5, lr=0.1)
    run.log(20, validation_loss=2.75)
    second = answer("curves", {"revision": first["revision"]}, folders)
    (found,) = second["runs"]
    assert found["curves"]["loss"] == {"steps": [10, 20], "values": [3.5, 2.5]}
    assert found["curves"]["validation_loss"] == {"steps": [20], "values": [2.75]}
    assert found["state"] == "training"
    assert found["best"] == {"step": 20, "value": 2.75}
    assert second["metrics"] == ["loss", "lr", "validation_loss"]
    assert answer("curves", {"revision": second["revision"]}, folders) == {
        "revision": second["revision"],
        "changed": False,
    }
    assert answer("curves", {"metric": "lr"}, folders)["runs"][0]["curves"]["lr"]["values"] == [0.1, 0.1]


def test_a_new_run_appears(run, tmp_path):
    folders = Folders([tmp_path / "runs"])
    assert len(answer("curves", {}, folders)["runs"]) == 1
    with RunFolder(tmp_path / "runs" / "lm-2", Recipe(), resume=False) as other:
        other.start(0)
        assert [each["name"] for each in answer("curves", {}, folders)["runs"]] == ["runs/lm-1", "runs/lm-2"]


def test_every_task_has_a_name_in_both_languages():
    assert sorted(TASK_NAMES) == sorted(TASKS)
    assert all(english and re.search("[一-鿿]", chinese) for english, chinese in TASK_NAMES.values())


def test_runs_are_alike_where_they_are_validated_on_the_same_tokens(tmp_path):
    """And only then: not with another file, tokenizer, row length or task; what changes no loss does not count."""
    phasor.save(Transformer(ModelConfig(vocab_size=7, dim=8, num_layers=1, num_heads=1)), tmp_path / "source")
    first = Recipe(model={"preset": "llama-2"}, data=DataConfig(train="texts/notes.txt"))
    recipes = {
        "first": first,
        "model": first.replace(model={"preset": "llama-2", "position": {"kind": "alibi"}}),
        "workers": first.replace(data=first.data.replace(workers=3, cache="cache")),
        "file": first.replace(data=DataConfig(train="other/notes.txt")),
        "tokens": first.replace(data=first.data.replace(tokenizer="bytes")),
        "length": first.replace(data=first.data.replace(sequence_length=32)),
        "task": first.replace(task="mlm", model={"preset": "bert"}),
        "tokens of a model": first.replace(init_from=str(tmp_path / "source"), model={}),
    }
    for name, recipe in recipes.items():
        with RunFolder(tmp_path / name, recipe, resume=False) as folder:
            folder.start(0)
    runs = {run["name"].split("/")[1]: run for run in answer("curves", {}, Folders([tmp_path]))["runs"]}
    alike = {name for name, run in runs.items() if run["validation"] == runs["first"]["validation"]}
    assert alike == {"first", "model", "workers"}
    assert [runs[name]["task"]["en"] for name in ("first", "task")] == ["language model", "masked language model"]
    assert runs["first"]["data"] == {"name": "notes.txt", "tokenizer": "auto", "sequence_length": 256}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"preset": "llama-2"}, "rotary"),
        ({"preset": "transformer-base", "shape": "decoder"}, "sinusoidal"),
        ({"preset": "llama-2", "position": {"kind": "alibi"}}, "alibi"),
        ({"dim": 64, "num_heads": 2, "num_layers": 1}, "none"),
    ],
)
def test_positions_are_those_of_the_model_that_a_recipe_builds(tmp_path, model, kind):
    recipe = Recipe(model=model)
    with RunFolder(tmp_path / "run", recipe, resume=False) as folder:
        folder.start(0)
    (run,) = answer("curves", {}, Folders([tmp_path / "run"]))["runs"]
    assert run["position"] == kind == model_config(recipe, 50).position.kind


def test_a_run_that_is_resumed_continues_its_curve(tmp_path):
    folder, recipe = tmp_path / "run", Recipe()
    folders = None
    for resume, steps, start in ((False, (10, 20, 30), 0), (True, (30, 40), 20)):
        with RunFolder(folder, recipe, resume=resume) as run:
            run.start(start)
            folders = folders or Folders([folder])
            for step in steps:
                run.log(step, loss=float(step + start))
            state = answer("curves", {}, folders)["runs"][0]
        assert state["state"] == "training"
    assert state["curves"]["loss"] == {"steps": [10, 20, 30, 40], "values": [10.0, 20.0, 50.0, 60.0]}
    assert answer("curves", {}, folders)["runs"][0]["state"] == "stopped"  # with its manifest, without its model
    (folder / "model").mkdir()
    assert answer("curves", {}, folders)["runs"][0]["state"] == "finished"


def test_a_run_that_writes_no_more_has_stopped(run, tmp_path):
    run.log(1, loss=1.0)
    for name in ("run.json", "metrics.jsonl"):
        long_ago = os.stat(run.path / name).st_mtime - LIVE_SECONDS - 1
        os.utime(run.path / name, (long_ago, long_ago))
    assert answer("curves", {}, Folders([run.path]))["runs"][0]["state"] == "stopped"


def test_lines_that_are_not_metrics_are_left_out(run):
    run.log(1, loss=1.0)
    odd = ["nothing", "[1]", '{"step": "x", "loss": 1}', '{"loss": 1}', '{"step": 2, "loss": NaN}', "1" * 5000]
    odd += [
        '{"step": 3, "loss": 1%s}' % ("0" * 400),
        '{"step": true, "loss": 1}',
        "[" * 100000,
        '{"step": 4, "loss": 2',
    ]
    with run.metrics_file.open("a") as file:
        file.write("\n".join(odd))
    folders = Folders([run.path])
    assert answer("curves", {}, folders)["runs"][0]["curves"]["loss"] == {"steps": [1], "values": [1.0]}
    with run.metrics_file.open("a") as file:
        file.write(".5}\n")
    assert answer("curves", {}, folders)["runs"][0]["curves"]["loss"] == {"steps": [1, 4], "values": [1.0, 2.5]}


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_link_out_of_the_folder_is_not_read(run, tmp_path, name):
    run.log(1, loss=1.0)
    (run.path / name).rename(tmp_path / "elsewhere")
    (run.path / name).symlink_to(tmp_path / "elsewhere")
    for each in answer("curves", {}, Folders([run.path]))["runs"]:
        assert "is a link out of the folder" in each["error"]


def test_a_damaged_marker_is_a_sentence(run, tmp_path):
    (run.path / "run.json").write_text("{}")
    (found,) = answer("curves", {}, Folders([run.path]))["runs"]
    assert found["error"] == "lm-1/run.json is not the marker of a run"


@pytest.mark.parametrize("points", [4, 7, 100])
def test_peaks_survive_thinning(points):
    values = numpy.random.default_rng(0).normal(size=1000)
    values[[123, 777]] = 9, -9
    kept = downsample(list(range(1000)), values.tolist(), points)
    assert len(kept["steps"]) <= points
    assert {0, 123, 777, 999} <= set(kept["steps"])
    assert kept["values"] == values[kept["steps"]].tolist()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    numpy.save(folder / "ids.npy", numpy.random.default_rng(0).integers(0, 50, 400))
    config = ModelConfig(vocab_size=50, dim=16, num_heads=2, num_layers=1, max_length=16, position="rotary")
    result = evaluate_lengths(
        Transformer(config), folder / "ids.npy", lengths="16,64", extensions=["none", "yarn"], out=folder / "one"
    )
    return folder, result


def test_a_report_of_lengths_is_shown(report):
    folder, result = report
    folders = Folders([folder])
    (listed,) = answer("curves", {}, folders)["reports"]
    assert listed["name"].endswith("/one")
    shown = answer("report", {"folder": listed["folder"]}, folders)
    assert [row["loss"] for row in shown["rows"]] == [row["loss"] for row in result["rows"]]
    assert shown["positions"] == json.loads(json.dumps(result["positions"]))
    assert len(shown["orders"]) == 2
    assert shown["how"].startswith("Protocol last")


@pytest.mark.parametrize("text", ["{}", "[]", "nothing", '{"model": 1, "names": 3}'])
def test_what_is_not_a_report_is_one_sentence(tmp_path, text):
    (tmp_path / "lengths.json").write_text(text)
    with pytest.raises(ValueError, match="lengths") as caught:
        answer("report", {}, Folders([tmp_path]))
    assert str(tmp_path) not in str(caught.value)


def test_a_folder_without_a_report_says_so(tmp_path):
    with pytest.raises(ValueError, match="holds no report of phasor evaluate --lengths"):
        answer("report", {}, Folders([tmp_path]))
