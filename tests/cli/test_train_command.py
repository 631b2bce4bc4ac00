"""`phasor train`: recipes and options, resuming, what it shows, and how it says no."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import CommandRunner, run
from decoding import speaker

import phasor
from phasor.cli import build_parser, main
from phasor.cli.train import build_recipe, next_command
from phasor.config.overrides import fields_of, without_none
from phasor.config.recipe import DEFAULT, Recipe
from phasor.config.recipe_help import GROUPS, HELP
from phasor.data import store
from phasor.models.presets import PRESETS
from phasor.training import run as run_of
from phasor.training import state

WORDS = ["one", "two", "three", "four", "five", "six"]
TEXT = "".join(f"{a} and {b} make {c}.\n" for a in WORDS for b in WORDS for c in WORDS)
PAIRS = "".join(f"{a} and {b}\t{b} {a}\n" for a in WORDS for b in WORDS)
WIDTHS = ["--model.dim", "16", "--model.num-heads", "2", "--model.num-layers", "1", "--model.hidden-dim", "24"]
ROWS = [
    "--data.tokenizer",
    "bytes",
    "--data.sequence-length",
    "48",
    "--train.batch-tokens",
    "96",
    "--train.device",
    "cpu",
]
SMALL = [*WIDTHS, *ROWS, "--data.validation-fraction", "0.1"]


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a text and pairs, and the working directory of the test."""
    (tmp_path / "notes.txt").write_text(TEXT)
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse_recipe(*arguments: str) -> Recipe:
    """The recipe that a command line stands for."""
    given = build_parser().parse_args(["train", *arguments])
    return build_recipe(given.recipe, given.changes, given.resume)


def test_a_run_in_a_process_of_its_own(place: Path) -> None:
    done = run("train", "--data.train", "notes.txt", *SMALL, "--train.steps=20", "--train.evaluate-every", "10")
    assert done.returncode == 0, done.stderr
    folder = place / "runs" / "lm-1"
    for name in ("recipe.json", "metrics.jsonl", "events", "checkpoints", "loss.png", "model/model.safetensors"):
        assert (folder / name).exists()
    sample, found, rest = done.stdout.partition("\nfinished after 20 of 20 steps in ")
    assert sample
    assert found
    for line in ("run      runs/lm-1", "model    runs/lm-1/model", "losses   runs/lm-1/loss.png"):
        assert line in rest.splitlines()
    assert "tensorboard --logdir runs/lm-1/events" in rest
    assert rest.endswith("next     phasor generate runs/lm-1 --prompt ... --temperature 0.8 --top-p 0.95\n")
    said = done.stderr.splitlines()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in said if "tokens/s" in line]
    assert steps == [1, *range(2, 21, 2)]
    assert [line.split(":")[0] for line in said if "validation loss" in line] == ["step 10", "step 20"]
    assert Recipe.from_file(folder / "recipe.json").train.steps == 20
    assert main(["generate", "runs/lm-1/model", "--prompt", "one", "--max-new-tokens", "3"]) == 0


def test_translation_ends_with_the_command_to_translate(run_phasor: CommandRunner) -> None:
    arguments = ["--task", "translation", "--model.preset", "transformer-base", "--data.train", "pairs.tsv"]
    out = run_phasor("train", *arguments, *SMALL, "--train.steps", "2")
    sample = out.splitlines()[0].partition("\t")[0]
    assert sample in PAIRS
    assert out.endswith(f"next     phasor translate runs/translation-1 '{sample}'\n")


def test_json_is_the_result(run_phasor: CommandRunner) -> None:
    arguments = ["train", "--data.train", "notes.txt", *SMALL, "--train.steps", "3", "--out", "here", "--json"]
    found = json.loads(run_phasor(*arguments))
    assert (found["folder"], found["status"], found["exit_code"], found["step"]) == ("here", "finished", 0, 3)
    assert found["best_loss"] == found["validation_loss"] > 0


def test_a_run_that_diverges_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    diverging = [
        "--optimizer.lr",
        "1e30",
        "--train.max-skips",
        "0",
        "--train.steps",
        "9",
        "--train.max-grad-norm",
        "none",
    ]
    assert main(["train", "--data.train", "notes.txt", *SMALL, *diverging, "--json"]) == 1
    out, error = capsys.readouterr()
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["status"] == "diverged"
    assert "more than --train.max-skips" in error


def test_resume_goes_on_by_the_recipe_of_the_run(run_phasor: CommandRunner, place: Path) -> None:
    first = ["train", "--data.train", "notes.txt", *SMALL, "--train.steps", "4", "--optimizer.lr", "1e-3"]
    run_phasor(*first)
    run_phasor("train", "--resume", "--out", "runs/lm-1", "--train.steps", "6")
    assert "resuming from step-00000004 of 6 steps" in run_phasor.error
    went_on = Recipe.from_file("runs/lm-1/recipe.json")
    assert (went_on.train.steps, went_on.optimizer.lr, went_on.out) == (6, 1e-3, "runs/lm-1")
    run_phasor(*first)
    assert (place / "runs" / "lm-2").is_dir()
    out = run_phasor("train", "--resume", "--train.steps", "5")
    assert "run      runs/lm-2" in out
    os.utime("runs/lm-1/recipe.json")
    assert parse_recipe("--resume").out == "runs/lm-1"
    with pytest.raises(ValueError, match="there is no run to resume"):
        parse_recipe("--resume", "--task", "mlm")
    assert "model.dim was 16 and is 32" in run_phasor.expect_error("train", "--resume", "--model.dim", "32")
    assert "holds a run already" in run_phasor.expect_error(*first, "--out", "runs/lm-1")


def test_a_run_goes_on_with_its_own_tokens_whatever_becomes_of_the_files(
    place: Path, run_phasor: CommandRunner
) -> None:
    learned = [*SMALL, "--data.tokenizer", "bpe", "--data.vocab-size", "300", "--data.document", "line"]
    for out in ("whole", "run"):
        steps = "5" if out == "whole" else "3"
        run_phasor("train", "--data.train", "notes.txt", *learned, "--schedule.kind", "constant", "--out", out,
                    "--train.steps", steps)  # fmt: skip
    (place / "notes.txt").write_text(TEXT.replace("one", "seven"))
    run_phasor("train", "--resume", "--out", "run", "--train.steps", "4")
    assert "the data are no longer as they were" in run_phasor.error
    (place / "notes.txt").unlink()
    run_phasor("train", "--resume", "--out", "run", "--train.steps", "5")
    whole, went_on = (Path(out, "model", "model.safetensors").read_bytes() for out in ("whole", "run"))
    assert whole == went_on
    (place / "notes.txt").write_text(TEXT.replace("one", "seven"))
    (place / "run" / "data").rename(place / "aside")
    said = run_phasor.expect_error("train", "--resume", "--out", "run", "--train.steps", "6")
    assert "notes.txt gives other tokens than those the run was trained on" in said
    assert not (place / "run" / "data").exists()
    (place / "notes.txt").write_text(TEXT)
    run_phasor("train", "--resume", "--out", "run", "--train.steps", "6")


def test_steps_take_the_place_of_epochs_and_epochs_of_steps(place: Path) -> None:
    (place / "r.yaml").write_text("train: {epochs: 3}")
    for arguments, wanted in [
        (["--train.epochs", "2"], (None, 2.0)),
        (["--train.steps", "7"], (7, None)),
        (["r.yaml", "--train.steps", "7"], (7, None)),
        (["r.yaml", "--train.epochs", "4"], (None, 4.0)),
        (["--train.steps", "none", "--train.epochs", "2"], (None, 2.0)),
    ]:
        train = parse_recipe(*arguments).train
        assert (train.steps, train.epochs) == wanted


def test_a_run_stopped_while_it_prepares_is_resumed_by_its_own_recipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, run_phasor: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", interrupt)
        assert main(["train", "--data.train", "notes.txt", *SMALL, "--train.steps", "3", "--out", "run"]) == 130
    assert capsys.readouterr().err == "phasor: stopped at once: --resume continues from what was saved\n"
    assert sorted(path.name for path in (place / "run").iterdir()) == [".lock", "recipe.json", "run.json"]
    run_phasor("train", "--resume", "--out", "run")
    assert Recipe.from_file("run/recipe.json").data.train == "notes.txt"
    (place / "run" / ".model-0123456789ab.part").mkdir()  # what a kill leaves
    run_phasor("train", "--resume", "--out", "run")
    assert not list((place / "run").glob(".model*"))


def test_a_mistake_leaves_a_folder_that_was_there_as_it_was(place: Path, run_phasor: CommandRunner) -> None:
    (place / "run").mkdir()
    arguments = ["train", "--data.train", "notes.txt", *SMALL, "--out", "run", "--model.vocab-size", "9"]
    assert "the tokenizer has 261 tokens" in run_phasor.expect_error(*arguments)
    assert not list((place / "run").iterdir())


@pytest.mark.parametrize("at", ["phasor.training.run.save", "phasor.training.run.RunFolder.log"])
def test_a_disk_full_elsewhere_names_the_checkpoint_that_is_left(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_of.RunFolder.log

    def full(*given: object, **values: object) -> None:
        if "validation_loss" not in values and given[1] != 3:
            return log(*given, **values)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(at, full if at.endswith("log") else lambda *given: full(None, 3))
    arguments = ["--train.steps", "3", "--save.every", "2", "--train.log-every", "1"]
    assert main(["train", "--data.train", "notes.txt", *SMALL, *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    left = "step-00000002" if at.endswith("log") else "step-00000003"
    assert last == (f"phasor: runs/lm-1 cannot be written: No space left on device; the newest whole one is {left}")


def test_sigterm_saves_and_ends_with_143(place: Path) -> None:
    arguments = ["train", "--data.train", "notes.txt", *SMALL, "--train.steps", "100000"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "phasor", *arguments], **how) as process:
        assert any(line.startswith("step 1/100,000") for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "which is saved" in error
    assert out.startswith("interrupted after ")
    assert out.endswith("next     phasor train --resume --out runs/lm-1\n")
    assert list((place / "runs" / "lm-1" / "checkpoints").glob("step-*"))


def test_a_full_disk_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    assert main(["train", "--data.train", "notes.txt", *SMALL, "--train.steps", "2"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("phasor: the checkpoint of step 2 cannot be written to runs/lm-1/checkpoints: No space left")


ASKED = {
    "--data.sequence-length 64": {"data": {"sequence_length": 64}},
    "--data.sequence-length=64": {"data": {"sequence_length": 64}},
    "--set data.sequence_length=64": {"data": {"sequence_length": 64}},
    "--data.sequence-length 3 --set data.sequence_length=64": {"data": {"sequence_length": 64}},
    "--set data.sequence_length=3 --data.sequence-length 64": {"data": {"sequence_length": 64}},
    "--train.max-skips 3": {"train": {"max_skips": 3}},
    "--train.max_skips 3": {"train": {"max_skips": 3}},
    "--train.max-grad-norm none --train.compile true": {"train": {"max_grad_norm": None, "compile": True}},
    "--optimizer.lr 1e-3": {"optimizer": {"lr": 1e-3}},
    "--schedule.kind wsd --schedule.decay 0.5": {"schedule": {"kind": "wsd", "decay": 0.5, "warmup": 50}},
    "--init-from x": {"init_from": "x"},
    "--out 7 --task mlm": {"out": "7", "task": "mlm"},
    "--model.position.kind alibi": {"model": {"position": {"kind": "alibi"}}},
    "--model.position.base=5e5": {"model": {"position": {"base": 5e5}}},
    "--model.position.base 5 --model.position rotary": {"model": {"position": {"kind": "rotary", "base": 5}}},
    "--model.position.extension.kind yarn --model.position.extension.factor 4": {
        "model": {"position": {"extension": {"kind": "yarn", "factor": 4}}}
    },
    "--model.feedforward.experts.num-experts 4": {"model": {"feedforward": {"experts": {"num_experts": 4}}}},
    "--model.attention.bias [q,k] --model.preset palm": {
        "model": {"attention": {"bias": ["q", "k"]}, "preset": "palm"}
    },
    "--model.layers '[{attention: {window: 8}}]'": {"model": {"layers": [{"attention": {"window": 8}}]}},
}


@pytest.mark.parametrize("line", ASKED)
def test_options_are_fields(line: str) -> None:
    def holds(found: Any, wanted: Any) -> bool:
        if isinstance(wanted, dict):
            return all(holds(found[name], value) for name, value in wanted.items())
        return found == wanted

    assert holds(parse_recipe(*shlex.split(line)).to_dict(), ASKED[line])


def test_without_arguments_it_is_the_default(place: Path) -> None:
    assert parse_recipe() == DEFAULT
    (place / "r.yaml").write_text("data: {format: python}\ntrain: {steps: 7}\n")
    assert parse_recipe("r.yaml") == Recipe.from_file("r.yaml")
    assert parse_recipe("r.yaml", "--train.steps", "8").train.steps == 8
    (place / "r.json").write_text(DEFAULT.to_json())
    assert parse_recipe("r.json") == DEFAULT


def test_files_take_the_place_of_data_made_by_code(place: Path) -> None:
    assert parse_recipe("--data.train", "notes.txt").data == DEFAULT.data.replace(train="notes.txt", format="auto")
    (place / "r.yaml").write_text("{task: translation, data: {format: dates}}")
    assert parse_recipe("r.yaml", "--data.train", "pairs.tsv").data.format == "auto"
    mixture = '[{"path": "a.jsonl"}, {"path": "b.txt", "weight": 2}]'
    assert parse_recipe("--data.mixture", mixture).data.format == "auto"


def test_a_loaded_model_brings_its_own_parts() -> None:
    recipe = parse_recipe("--init-from", "folder")
    assert (recipe.model, recipe.data.tokenizer, recipe.optimizer.lr) == ({}, "auto", 3e-4)


@pytest.mark.parametrize(
    ("lengths", "row", "batch"),
    [
        ({"max_length": 4096}, 4096, 16384),
        ({"max_length": 4096, "trained_length": 640}, 640, 2560),
        ({"max_length": 1 << 17}, 4096, 16384),
        ({"max_length": 64}, 64, 1024),
    ],
)
def test_a_loaded_model_brings_its_own_length(tmp_path: Path, lengths: dict[str, int], row: int, batch: int) -> None:
    model = phasor.ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=2, position="rotary", **lengths)
    phasor.save(phasor.Transformer(model), tmp_path / "base")
    recipe = parse_recipe("--init-from", str(tmp_path / "base"))
    assert (recipe.data.sequence_length, recipe.train.batch_tokens) == (row, batch)
    given = parse_recipe("--init-from", str(tmp_path / "base"), "--data.sequence-length", "32")
    assert given.data.sequence_length == 32


def every_field(record: Any = Recipe, above: str = "") -> Iterator[str]:
    """The dotted names of the fields of a recipe, and of the model's own ones."""
    for name, hint in fields_of(record).items():
        inner = without_none(hint)
        if fields_of(inner) and not above:
            yield from every_field(inner, f"{name}.")
        else:
            yield above + name


def test_every_field_has_its_line_in_the_help() -> None:
    assert sorted(every_field()) == sorted(HELP)
    assert {name.rpartition(".")[0] for name in HELP} == set(GROUPS)
    text = " ".join(run("train", "--help").stdout.split())
    for name, line in HELP.items():
        assert re.search(rf"--{re.escape(name.replace('_', '-'))}[ .]", text)
        assert line in text
    for shown in (
        *PRESETS,
        "--data.format auto|text|jsonl|parquet|tsv|python|dates|recall|docstrings",
        "(default: 256)",
        "(default: cosine 0.1, linear 0, wsd 0)",
        ", ".join(phasor.kinds("positions")),
        "exit codes: 0 finished 1 diverged",
        "143 stopped by SIGTERM",
    ):
        assert shown in text


@pytest.fixture
def model_folder(place: Path) -> str:
    phasor.save(speaker(), place / "ids")
    return "ids"


MISTAKES = {
    "--data.sequence-lenght 3": "did you mean '--data.sequence-length'?",
    "--optimizer.rl 3": "did you mean '--optimizer.lr'?",
    "--taks lm": "did you mean '--task'?",
    "--set data.sequence_lenght=3": "did you mean 'sequence_length'?",
    "--set data.sequence_length": "--set takes FIELD=VALUE, not 'data.sequence_length'",
    "--model.positon.kind rotary": "did you mean 'position'?",
    "--model.position.bse 3": "unknown field of a position scheme 'bse' (did you mean 'base'?)",
    "--model.position.kind rotry": "did you mean 'rotary'?",
    "--model.position.extension.factr 3": "did you mean 'factor'?",
    "--model.preset gtp-2": "did you mean 'gpt-2'?",
    "--model.dim.x 3": "model.dim is 16, which has no fields",
    "--model.layers.x 3": "model.layers is a list, which has no fields",
    "--model.dim": "--model.dim: expected one argument",
    "--model.dim wide": "--model.dim must be an integer, not 'wide'",
    "--model.dim 15": "not divisible by num_heads",
    "--model.preset bert": "the task 'lm' trains a decoder, and this model is an encoder",
    "--train.steps many": "phasor: --train.steps must be an integer, not 'many'",
    "--train.compile yes": "must be true or false",
    "--data.format csv": "--data.format must be one of",
    "--schedule.kind cosin": "did you mean 'cosine'?",
    "--train.device nonsense": "'nonsense' cannot be used",
    "--data.sequence-length 513 --train.batch-tokens 600 --model.position.kind learned": "this model allows 512 tokens",
    "--data.train nowhere.txt": "nowhere.txt does not exist",
    "--data.train empty.txt": "empty.txt holds no text",
    "--data.train line.txt": "one example of one line",
    "--data.train latin.txt": "latin.txt, line 2: the byte 8 (0xfc) is not UTF-8",
    "--data.train binary.txt.gz": "binary.txt.gz cannot be read",
    "--data.tokenizer bpe --data.vocab-size 100": "--data.vocab-size must be at least 261",
    "--out notes.txt": "notes.txt is a file, and a run needs a folder",
    "nowhere.yaml": "nowhere.yaml cannot be read",
    "list.yaml": "list.yaml must hold a mapping",
    "broken.json": "broken.json, line 2: this is not JSON",
    "wrong.yaml": "wrong.yaml: --train.steps must be an integer, not 'many'",
    "wrong.yaml --train.steps few": "wrong.yaml: --train.steps must be an integer, not 'many'",
    "right.yaml --train.steps few": "phasor: --train.steps must be an integer, not 'few'",
    "--init-from ids --model.preset gpt-2": "leave --model.preset out",
    "--init-from nowhere": "there is no folder nowhere here",
    "--train.epochs 1e308": "more steps than can be counted",
    "--data.workers 1000": "--data.workers must be at most 256",
    "--data.tokenizer bpe --data.vocab-size 9223372036854775807": "--data.vocab-size must be at most 16777216",
    "--data.train-target pairs.tsv": "--data.train-target is for translation",
    "--train.device meta": "the device 'meta' cannot be used",
    "--data.train number.jsonl": "number.jsonl, line 1: 'text' (--data.field) is 3, and not text",
    "--model.dim 1000000000000": "--model.dim must be at most 262,144",
    "--out notes.txt/run": "notes.txt/run cannot be written: Not a directory",
    "unhashable.yaml": "unhashable.yaml, line 1: this is not YAML: found unhashable key",
    "--train.steps ''": "--train.steps needs a value, or none, not empty text",
    "--out ''": "--out needs a value",
    "--train.max_skips x": "--train.max_skips must be an integer, not 'x'",
    "--set train.max_skips=x": "phasor: train.max_skips must be an integer, not 'x'",
    "--train.precision float8": "--train.precision float8 needs a GPU, and the device is cpu",
    "--data.train table.parquet": "table.parquet cannot be read past row 0",
    "--data.train table.bin": "table.bin is not a text file: data are read from UTF-8 text, .jsonl and .tsv",
    "--data.train pipe": "pipe",
    "--init-from ids": "the weights of ids belong to its own tokenizer, and --data.tokenizer is 'bytes'",
    "--init-from ids --data.tokenizer auto": "ids has no tokenizer.json, and its weights belong to a tokenizer",
    "--resume": "there is no run to resume below runs",
    "--resume --out typo": "typo holds no run to resume",
    "--resume --overwrite --out typo right.yaml": "a run is resumed or overwritten, not both",
    "tag.yaml": "tag.yaml: this is not YAML",
}
PAIR_MISTAKES = {
    "--data.train three.tsv": "three.tsv, line 2: a pair has 2 columns, and this line has 3",
    "--data.train notes.txt": "translation needs pairs",
    "--data.train notes.txt --data.train-target pairs.tsv": "pairs.tsv ends after 36 lines, and notes.txt goes on",
    "--data.train pairs.tsv --data.sequence-length 3 --data.too-long skip": (
        "nothing is left to train on: 36 pairs with more than 3 tokens on a side"
    ),
    "--data.train pairs.tsv --data.sequence-length 12": (
        "a pair has 14 tokens on a side, and --data.sequence-length is 12"
    ),
}


@pytest.fixture
def files(place: Path) -> None:
    """What the mistakes are made with."""
    (place / "empty.txt").write_text("")
    (place / "line.txt").write_text("one line")
    (place / "latin.txt").write_bytes("eins\nfünf\n".encode("latin-1").replace(b"f\xfc", b"fun\xfc"))
    (place / "binary.txt.gz").write_bytes(b"no gzip")
    (place / "three.tsv").write_text("a\tb\na\tb\tc\n")
    (place / "list.yaml").write_text("- 1")
    (place / "broken.json").write_text('{"task": "lm",\n"data" 3}')
    (place / "wrong.yaml").write_text("train: {steps: many}")
    (place / "number.jsonl").write_text('{"text": 3}')
    (place / "unhashable.yaml").write_text("{[a]: 1}")
    (place / "tag.yaml").write_text("out: !!timestamp soon")
    for name in ("table.parquet", "table.bin"):
        (place / name).write_bytes(b"PAR1" + bytes(range(256)))
    os.mkfifo(place / "pipe")
    (place / "right.yaml").write_text("train: {steps: 3}")


@pytest.mark.parametrize("line", [*MISTAKES, *PAIR_MISTAKES])
def test_mistakes_are_told_in_one_line_and_leave_nothing(
    line: str, files: None, model_folder: str, place: Path, run_phasor: CommandRunner
) -> None:
    before = sorted(place.rglob("*"))
    usual = ["--data.train", "notes.txt", *ROWS] + ([] if "--init-from" in line or ".yaml" in line else WIDTHS)
    if line in PAIR_MISTAKES:
        usual += ["--task", "translation", "--model.preset", "transformer-base"]
    said = run_phasor.expect_error("train", *usual, *shlex.split(line))
    assert (MISTAKES | PAIR_MISTAKES)[line] in said
    assert sorted(place.rglob("*")) == before


def test_a_vocabulary_that_does_not_fit_leaves_nothing(
    model_folder: str, place: Path, run_phasor: CommandRunner
) -> None:
    before = sorted(place.rglob("*"))
    arguments = ["--init-from", model_folder, "--data.train", "notes.txt", *ROWS, "--data.replace-tokenizer", "true"]
    said = run_phasor.expect_error("train", *arguments)
    assert "the tokenizer has 261 tokens, and the model's vocabulary 61" in said
    assert sorted(place.rglob("*")) == before


def test_mistakes_in_a_process_have_no_traceback(files: None, place: Path) -> None:
    before = sorted(place.rglob("*"))
    done = run("train", "--data.train", "latin.txt", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phasor: latin.txt, line 2: the byte ")
    assert done.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before


def test_yaml_needs_a_package(monkeypatch: pytest.MonkeyPatch, place: Path, run_phasor: CommandRunner) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (place / "r.yaml").write_text("task: lm")
    assert "pip install 'phasor-transformer[train]'" in run_phasor.expect_error("train", "r.yaml")
    assert parse_recipe("--data.train", "notes.txt").data.train == "notes.txt"
    (place / "r.json").write_text(DEFAULT.to_json())
    assert parse_recipe("r.json") == DEFAULT


PRESET_NAMES = ["transformer-base", "gpt-2", "llama-3.1", "palm", "t5", "bert", "deepnet", "grok-1"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_train_by_name(name: str, run_phasor: CommandRunner) -> None:
    task = {"encoder-decoder": "translation", "encoder": "mlm", "decoder": "lm"}[phasor.preset(name).shape]
    data = ["--task", task, "--data.train", "pairs.tsv" if task == "translation" else "notes.txt"]
    sizes = [*SMALL, "--train.steps", "2", "--model.preset", name]
    sizes += ["--model.feedforward.experts.num-experts", "2"] if name == "grok-1" else []
    own = phasor.preset(name).position.kind
    other = "alibi" if own in ("rotary", "t5") else "rotary"
    for position, arguments in ((own, []), (other, ["--model.position.kind", other])):
        found = json.loads(run_phasor("train", *data, *sizes, *arguments, "--json", "--out", position))
        assert (found["status"], found["step"]) == ("finished", 2)
        made = phasor.load(f"{position}/model").config
        assert (made.position.kind, made.dim, made.num_layers) == (position, 16, 1)
        assert made.placement == phasor.preset(name).placement


@pytest.mark.slow
def test_the_default_makes_its_own_data(run_phasor: CommandRunner) -> None:
    out = run_phasor("train", "--train.steps", "2", "--train.evaluate-every", "2")
    assert out.endswith("next     phasor generate runs/lm-1 --prompt 'def ' --temperature 0.8 --top-p 0.95\n")


@pytest.mark.parametrize(
    ("task", "command"), [("chat", "phasor chat 'my runs/a'"), ("preference", "phasor evaluate 'my runs/a'")]
)
def test_what_to_do_with_a_run_depends_on_its_task(task: str, command: str) -> None:
    result = SimpleNamespace(folder=Path("my runs/a"), status="finished", sample=None)
    assert next_command(result, Recipe(task=task)) == command
