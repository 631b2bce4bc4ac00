"""Options of a run: the best model, early stopping, dry runs, fine-tuning, and what must not end a run."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
import training_runs
from safetensors.torch import load_file
from training_runs import Notes, StopAt, recipe, run

import phasor
from phasor.checkpoints.runs import MARKER, checkpoints, find_weights
from phasor.cli import main
from phasor.config.recipe import Recipe
from phasor.training import checks, loop
from phasor.training import run as run_module
from phasor.training.optimizer import EMA
from phasor.training.trainer import Trainer

TEXT = "".join(f"line {number} has {number % 7} in it\n" for number in range(80))
SIZES = "--model.dim 16 --model.num-heads 2 --model.num-layers 1 --model.hidden-dim 24 --data.sequence-length 48"
HOW = "--data.document line --train.batch-tokens 96 --train.device cpu --schedule.warmup 0 --data.train notes.txt"
ARGUMENTS = [*HOW.split(), "--data.sequence-length", "48"]
NEW = [*ARGUMENTS, *SIZES.split(), "--data.tokenizer", "bytes"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXT)
    return tmp_path


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def validation(monkeypatch):
    """Validation losses by the order of evaluations."""

    def set_losses(*losses):
        each = iter(losses)
        monkeypatch.setattr(Trainer, "validation_loss", lambda *given: next(each))

    return set_losses


@pytest.mark.parametrize("best", [True, False])
def test_the_model_is_the_best_checkpoint_or_the_last(tmp_path, validation, best):
    validation(3.0, 1.0, 2.0)
    notes = Notes()
    result = run(recipe(tmp_path, train__ema_decay=0.5, save__best=best), notes=notes)
    assert (result.best_step, result.model_step) == (8, 8 if best else 12)
    group = tmp_path / "checkpoints" / f"step-{result.model_step:08d}" / "ema.safetensors"
    assert same(weights(tmp_path / "model"), load_file(group))
    assert any("the model is that of step 8" in line for line in notes.said) == best


def test_a_best_checkpoint_that_is_damaged_is_not_taken(tmp_path, validation):
    def damage(step):
        if step == 11:
            (tmp_path / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"")

    validation(3.0, 1.0, 2.0)
    notes = Notes(damage)
    assert run(recipe(tmp_path), notes=notes).model_step == 12
    assert any("not of the best one, 8" in line for line in notes.said)


def test_patience_ends_a_run_and_is_counted_through_a_resumption(tmp_path, validation):
    validation(3.0, 4.0, 5.0)
    assert run(recipe(tmp_path, train__patience=2), notes=Notes(StopAt(9))).step == 9
    notes = Notes()
    result = run(recipe(tmp_path, train__patience=2), resume=True, notes=notes)
    assert (result.status, result.step, result.steps, result.model_step) == ("finished", 12, 12, 4)
    validation(3.0, 4.0, 5.0)
    result = run(recipe(tmp_path / "other", train__patience=1), notes=notes)
    assert (result.status, result.step, result.steps, result.exit_code) == ("finished", 8, 12, 0)
    assert "1 evaluations in a row found no lower validation loss than that of step 4" in notes.said[-2]


def test_a_dry_run_says_what_it_would_do_and_leaves_nothing(place, capsys):
    before = sorted(place.rglob("*"))
    assert main(["train", *NEW, "--train.steps", "7", "--out", "deep/run", "--dry-run"]) == 0
    out, error = capsys.readouterr()
    assert out == "nothing is written: without --dry-run the run goes to deep/run\n"
    lines = error.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "data", "training", "run"]
    assert "vocabulary of 261" in lines[0]
    assert "79 examples" in lines[1]
    assert "7 steps of up to 96 tokens, in rows of up to 48, on cpu in float32" in lines[2]
    assert sorted(place.rglob("*")) == before
    assert main(["train", *NEW, "--train.steps", "2", "--out", "run"]) == 0
    files = {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}
    assert main(["train", "--resume", "--out", "run", "--train.steps", "5", "--dry-run"]) == 0
    assert "from step 2" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()} == files


def test_a_warmup_longer_than_the_run_is_said(tmp_path):
    notes = Notes()
    run(recipe(tmp_path, train__steps=2, schedule={"kind": "cosine", "warmup": 30}), notes=notes)
    assert "schedule.warmup is 30, and the run has 2 steps" in notes.said[0]


def test_resuming_a_fine_tune_does_not_need_the_folder_it_began_with(place, capsys):
    """And it ends with the same files as one that was never stopped."""
    assert main(["train", *NEW, "--train.steps", "2", "--out", "first"]) == 0
    shutil.copytree("first/model", "base")
    (place / "base" / "phasor_manifest.json").unlink()
    (place / "base" / "chat_template.jinja").write_text("{{ messages }}")
    settings = json.loads((place / "base" / "generation_config.json").read_text()) | {"repetition_penalty": 1.25}
    (place / "base" / "generation_config.json").write_text(json.dumps(settings))
    tune = ["train", *ARGUMENTS, "--init-from", "base", "--schedule.kind", "constant"]
    assert main([*tune, "--train.steps", "4", "--out", "whole"]) == 0
    assert main([*tune, "--train.steps", "2", "--out", "run"]) == 0
    shutil.rmtree("base")
    assert main(["train", "--resume", "--out", "run", "--train.steps", "4"]) == 0
    whole, went_on = (
        {file.name: file.read_bytes() for file in Path(out, "model").iterdir()} for out in ("whole", "run")
    )
    assert went_on == whole
    assert "chat_template.jinja" in whole
    for checkpoint in (None, "last"):
        weights = Path("run", "model") if checkpoint is None else find_weights(Path("run"), checkpoint)
        assert phasor.load(weights).generation_settings == {"repetition_penalty": 1.25}
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "run", "--init-from", "other", "--train.steps", "5"]) == 2
    assert '--init-from was "base" and is "other"' in capsys.readouterr().err


def test_pretrained_weights_keep_their_tokenizer_unless_it_is_said(place, capsys):
    assert main(["train", *NEW, "--train.steps", "1", "--out", "first"]) == 0
    bytes_again = ["--init-from", "first", *ARGUMENTS, "--data.tokenizer", "bytes", "--train.steps", "1"]
    assert main(["train", *bytes_again, "--out", "same"]) == 0  # it is the model's own
    (place / "first" / "model" / "tokenizer.json").unlink()
    (place / "first" / "model" / "phasor_manifest.json").unlink()
    learned = ["--init-from", "first/model", *ARGUMENTS, "--data.vocab-size", "261", "--train.steps", "1"]
    for tokenizer in ([], ["--data.tokenizer", "bpe"], ["--data.tokenizer", "unigram"]):
        assert main(["train", *learned, *tokenizer, "--out", "second"]) == 2
        assert "--data.replace-tokenizer" in capsys.readouterr().err
    assert main(["train", *learned, "--data.replace-tokenizer", "true", "--out", "second"]) == 0


def test_a_folder_as_data_leaves_out_what_is_not_text(place, capsys):
    shutil.move("notes.txt", "texts.txt")
    arguments = ["train", *NEW, "--data.train", ".", "--train.steps", "1"]
    (place / ".git").mkdir()
    (place / ".git" / "config").write_text("hidden")
    (place / "image.png").write_bytes(bytes(range(256)))
    tokens = []
    for number in (1, 2, 3):
        assert main([*arguments, "--data.cache", "kept"]) == 0
        left_out = next(line for line in capsys.readouterr().err.splitlines() if "left out" in line)
        assert "1 hidden file or folder, 1 binary file" in left_out
        assert f"{2 * number - 1} folder" in left_out  # runs, this one among them, and what the cache holds
        tokens.append((place / "runs" / f"lm-{number}" / "data" / "train.0.tokens").read_bytes())
        (place / "more.txt").write_text("\n" * number)  # other files, and the same text
    assert tokens[0] == tokens[1] == tokens[2]


def test_any_checkpoint_is_a_model(place, capsys):
    steps = ["--train.steps", "4", "--save.every", "1", "--save.keep", "9", "--train.evaluate-every", "2"]
    assert main(["train", *NEW, *steps, "--train.ema-decay", "0.5", "--out", "run"]) == 0
    folders = dict(checkpoints(place / "run" / "checkpoints"))
    assert find_weights(place / "run") == place / "run" / "model"
    assert find_weights(place / "run", "last") == folders[4]
    assert find_weights(place / "run", "best") == folders[phasor_best(folders)]
    for which in ("3", "best", "last"):
        chosen = find_weights(place / "run", which)
        model = phasor.load(chosen)
        assert torch.equal(model.tokens.weight, load_file(chosen / "ema.safetensors")["tokens.weight"])
        assert main(["convert", "run", f"as-{which}", "--checkpoint", which]) == 0
        exported = phasor.load(f"as-{which}")
        assert torch.equal(exported.tokens.weight, model.tokens.weight)
        assert exported.tokenizer.to_str() == model.tokenizer.to_str()
        assert main(["generate", "run", "--checkpoint", which, "--prompt", "line", "--max-new-tokens", "3"]) == 0
        capsys.readouterr()
        assert main(["evaluate", "run", "--checkpoint", which, "--device", "cpu", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["weights"] == chosen.name
        assert phasor.evaluate(chosen, "notes.txt", device="cpu")["tokens"] > 0
    assert main(["explain", "run", "--checkpoint", "3"]) == 0
    assert main(["generate", "run", "--prompt", "line", "--max-new-tokens", "3"]) == 0
    assert main(["generate", "run", "--checkpoint", "7", "--prompt", "line"]) == 2
    assert "run has no checkpoint '7'; there are: best, last, 1, 2, 3, 4" in capsys.readouterr().err
    shutil.rmtree(place / "run" / "model")
    assert find_weights(place / "run") == folders[phasor_best(folders)]
    assert main(["train", "--init-from", "run", *ARGUMENTS, "--train.steps", "1", "--out", "tuned"]) == 0


def phasor_best(folders):
    return json.loads((folders[4] / "state.json").read_text())["values"]["best_step"]


def test_a_model_folder_is_evaluated_on_given_data(place, capsys):
    assert main(["train", *NEW, "--train.steps", "1", "--data.valid", "notes.txt", "--out", "run"]) == 0
    by_model = phasor.evaluate("run/model", "notes.txt", device="cpu")
    assert by_model["bytes"] == len(TEXT.encode())
    with pytest.raises(ValueError, match="no validation data"):
        phasor.evaluate("run/model", device="cpu")


def test_evaluation_beside_training_survives_a_pruned_checkpoint(place, monkeypatch, capsys):
    from phasor.checkpoints import open_model as opening

    assert main(["train", *NEW, "--train.steps", "2", "--save.every", "1", "--out", "run"]) == 0
    shutil.rmtree("run/model")
    first, load = find_weights(place / "run"), opening.load

    def prune_first(folder, *given, **options):
        if folder.resolve() == first and folder.exists():
            shutil.rmtree(folder)
        return load(folder, *given, **options)

    monkeypatch.setattr(opening, "load", prune_first)
    found = phasor.evaluate("run", device="cpu")
    assert found["weights"] != first.name


def test_a_failed_event_does_not_end_a_run(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def full(*given, **named):
        raise OSError(28, "No space left on device")

    whole = run(recipe(tmp_path / "whole", train__steps=3))
    for name in ("add_scalar", "__init__", "close"):
        notes = Notes()
        with monkeypatch.context() as patch:
            patch.setattr(SummaryWriter, name, full)
            result = run(recipe(tmp_path / name, train__steps=3), notes=notes)
        assert (result.status, result.loss) == ("finished", whole.loss)
        assert sum("No space left" in line for line in notes.said) == 1


def test_a_thread_that_cannot_write_events_prints_no_traceback(tmp_path, monkeypatch, capfd):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*given):
        raise OSError(28, "No space left on device")

    notes, hook = Notes(), threading.excepthook
    monkeypatch.setattr(RecordWriter, "write", full)
    assert run(recipe(tmp_path, train__steps=3), notes=notes).status == "finished"
    assert sum("No space left" in line for line in notes.said) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is hook


def test_a_skipped_step_leaves_the_average_alone(tmp_path):
    """The average after ten steps of which some are skipped is that over the others, and so is their count."""
    seen, update = [], EMA.update

    def note(self, model, changed=None):
        update(self, model, changed)
        seen.append((self.updates, {name: x.clone() for name, x in self.weights.items()}))

    EMA.update = note
    try:
        run(recipe(tmp_path, train__ema_decay=0.9, train__steps=6), break_at=(0, 3))
    finally:
        EMA.update = update
    assert [count for count, _ in seen] == [0, 1, 2, 2, 3, 4]
    assert same(seen[2][1], seen[3][1])
    assert not same(seen[3][1], seen[4][1])


def test_the_average_is_that_of_the_formula():
    model = torch.nn.Linear(5, 3)
    ema, decay = EMA(model, 0.9), 0.9
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for number in range(1, 8):
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 5))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
        ema.update(model, torch.tensor(True))
        ema.update(model, torch.tensor(False))
        torch.testing.assert_close(ema.weights["weight"].double(), expected / (1 - decay**number), rtol=1e-5, atol=1e-6)


def test_losses_that_are_null_are_read(tmp_path):
    """JSON has no NaN: a loss that is not finite is written as null, and such a line does not end a run."""
    run(recipe(tmp_path), notes=Notes(StopAt(3)))
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 2, "loss": null, "validation_loss": "x"}\n')
    assert run(recipe(tmp_path), resume=True).status == "finished"
    folder = run_module.RunFolder(tmp_path / "new", recipe(tmp_path / "new"), resume=False)
    with folder as opened:
        opened.start(0)
        opened.log(1, loss=float("nan"), lr=0.5)
    assert json.loads((tmp_path / "new" / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "lr": 0.5}


@pytest.mark.parametrize("given", ["r.yaml", {"task": "lm"}, None, Path("r.yaml")])
def test_train_takes_a_recipe(given):
    with pytest.raises(ValueError, match="train takes a Recipe, not"):
        phasor.train(given)


def test_a_recipe_is_read_from_a_path():
    with pytest.raises(ValueError, match="given by its path, not from None"):
        Recipe.from_file(None)


def test_a_missing_compiler_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def missing(*given, **named):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found. Set TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(checks.torch, "compile", lambda function: missing)
    with pytest.raises(
        ValueError,
        match=r"train.compile does not work on cpu here, set it to false: .*No working C\+\+ compiler found\.$",
    ):
        run(recipe(tmp_path / "run", train__compile=True))
    assert not (tmp_path / "run").exists()


def test_the_marker_comes_first(tmp_path, monkeypatch):
    """Before anything else is in the folder, and a recipe can always be read from it."""
    written = []
    claim = run_module.RunMarker.claim
    monkeypatch.setattr(
        run_module.RunMarker,
        "claim",
        lambda self, name, link=None: (
            written.append(sorted(p.name for p in self.folder.iterdir())),
            claim(self, name, link),
        ),
    )
    run(recipe(tmp_path / "run", train__steps=1))
    assert written[0] == [MARKER]


def test_a_changed_recipe_file_is_refused(tmp_path):
    run(recipe(tmp_path), notes=Notes(StopAt(3)))
    file = tmp_path / "recipe.json"
    file.write_text(file.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    with pytest.raises(ValueError, match=r"recipe.json was changed after it was written"):
        run(recipe(tmp_path), resume=True)


def test_a_damaged_marker_is_said(tmp_path):
    run(recipe(tmp_path), notes=Notes(StopAt(3)))
    file = tmp_path / MARKER
    file.write_text(file.read_text().replace("0.01", "0.02"))
    with pytest.raises(ValueError, match=r"run.json is damaged"):
        run(recipe(tmp_path), resume=True)


def test_summary_of_a_run_is_reported(tmp_path):
    class Summary(Notes):
        def on_start(self, summary):
            self.summary = summary

    notes = Summary()
    run(recipe(tmp_path, train__steps=1), notes=notes)
    assert (notes.summary.folder, notes.summary.steps, notes.summary.vocab_size) == (
        tmp_path,
        1,
        training_runs.VOCABULARY,
    )
    assert loop.TrainingProgress().on_start(notes.summary) is None
