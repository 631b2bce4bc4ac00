"""Training runs: what they leave, that a stopped one goes on as if it had not been, and what ends one."""

import json
import math
import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import training_runs
from processes import forkserver
from safetensors.torch import load_file
from training_runs import Notes, StopAt, recipe, run

import phasor
from phasor.checkpoints.runs import is_run
from phasor.data.prefetch import StepBatches
from phasor.training import loop, state
from phasor.training.build import build_model, model_config
from phasor.training.signals import StopSignal
from phasor.training.state import checkpoints
from phasor.training.trainer import Trainer

MATERIAL = training_runs.stand_in(recipe("nowhere"), None, None)


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(folder):
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in read]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped, and its folder."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return run(recipe(folder)), folder


def test_a_run_learns_and_leaves_a_folder(tmp_path):
    notes = Notes()
    result = run(recipe(tmp_path / "run", train__steps=40, model__dropout={}), notes=notes)
    assert (result.status, result.exit_code, result.step, result.skips) == ("finished", 0, 40, 0)
    assert notes.losses[1] > 2.5
    assert result.loss < 1.0
    assert result.best_loss == min(notes.validations.values())
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names >= {"recipe.json", "metrics.jsonl", "events", "checkpoints", "loss.png", "model", "samples.txt"}
    assert len(list((tmp_path / "run" / "events").iterdir())) == 1
    model = phasor.load(tmp_path / "run" / "model")
    assert len(phasor.generate(model, [5, 8, 11], max_new_tokens=4)) == 4
    assert [step for step, _ in checkpoints(tmp_path / "run" / "checkpoints")][-1] == 40
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == list(range(1, 41))


def test_a_run_is_the_same_twice_and_leaves_the_generators_alone(tmp_path, whole):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(recipe(tmp_path))
    assert torch.equal(torch.rand(3), expected)
    assert same(weights(tmp_path), weights(whole[1]))


def test_another_seed_is_another_run(tmp_path, whole):
    run(recipe(tmp_path, train__seed=1))
    assert not same(weights(tmp_path), weights(whole[1]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [1, 3, 4, 11])
def test_a_resumed_run_is_one_that_never_stopped(tmp_path, whole, step):
    """Weights, optimizer, average of the losses and metrics, with dropout, packed rows and three epochs."""
    stopped = run(recipe(tmp_path), notes=Notes(StopAt(step)))
    assert (stopped.status, stopped.exit_code, stopped.step) == ("interrupted", 143, step)
    assert not (tmp_path / "model").exists()
    notes = Notes()
    result = run(recipe(tmp_path), resume=True, notes=notes)
    assert result.status == "finished"
    assert min(notes.losses) == step + 1
    assert same(weights(tmp_path), weights(whole[1]))
    assert lines(tmp_path) == lines(whole[1])
    ours, theirs = (sorted((f / "checkpoints").iterdir())[-1] for f in (tmp_path, whole[1]))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()


HARD = {
    "train__ema_decay": 0.9,
    "train__gradient_accumulation_steps": 2,
    "train__label_smoothing": 0.1,
    "train__z_loss": 1e-3,
    "data__workers": 2,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_so_it_is_with_every_option(tmp_path, precision):
    options = HARD | {"train__precision": precision, "train__activation_checkpointing": True}
    for name, stop in (("whole", 99), ("stopped", 5)):
        run(recipe(tmp_path / name, **options), notes=Notes(StopAt(stop)))
    run(recipe(tmp_path / "stopped", **options), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "stopped")


def test_ctrl_c_ends_with_its_own_code_and_the_handlers_come_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    result = run(recipe(tmp_path), notes=Notes(StopAt(3, signal.SIGINT)))
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_during_evaluation_saves_and_the_evaluation_is_made_up_for(tmp_path, whole, monkeypatch):
    validation_loss = Trainer.validation_loss

    def interrupt(self, batches, stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        return validation_loss(self, batches, stopped)

    monkeypatch.setattr(Trainer, "validation_loss", interrupt)
    result = run(recipe(tmp_path))
    assert (result.status, result.step, result.validation_loss) == ("interrupted", 4, None)
    monkeypatch.undo()
    notes = Notes()
    run(recipe(tmp_path), resume=True, notes=notes)
    assert list(notes.validations) == [4, 8, 12]
    assert same(weights(tmp_path), weights(whole[1]))
    assert lines(tmp_path) == lines(whole[1])


def test_a_second_signal_ends_at_once():
    with StopSignal() as stop:
        stop.graceful = True
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)


def test_before_the_first_step_there_is_nothing_to_save():
    with StopSignal(), pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)


def test_resume_before_the_first_checkpoint_starts_fresh_and_says_so(tmp_path, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "build_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(recipe(tmp_path, train__steps=1))
    monkeypatch.undo()
    notes = Notes()
    assert run(recipe(tmp_path, train__steps=1), resume=True, notes=notes).status == "finished"
    assert "no checkpoint yet" in notes.said[0]


def test_resume_of_a_finished_run_has_nothing_to_do(tmp_path, whole):
    run(recipe(tmp_path))
    notes = Notes()
    result = run(recipe(tmp_path), resume=True, notes=notes)
    assert (result.status, notes.losses) == ("finished", {})
    assert same(weights(tmp_path), weights(whole[1]))


def test_resume_with_another_model_is_refused_with_what_changed(tmp_path):
    run(recipe(tmp_path, train__steps=2))
    before = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    with pytest.raises(ValueError, match=r"model\.dim was 24 and is 48"):
        run(recipe(tmp_path, model__dim=48), resume=True)
    with pytest.raises(ValueError, match=r"train\.seed was 0 and is 3"):
        run(recipe(tmp_path, train__seed=3), resume=True)
    assert sorted(file.name for file in (tmp_path / "checkpoints").iterdir()) == before


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    run(recipe(tmp_path, train__steps=2, schedule={"kind": "constant"}))
    run(recipe(tmp_path, train__steps=5, schedule={"kind": "constant"}), resume=True)
    run(recipe(tmp_path / "once", train__steps=5, schedule={"kind": "constant"}))
    assert same(weights(tmp_path), weights(tmp_path / "once"))


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    run(recipe(tmp_path, train__steps=2))
    with pytest.raises(ValueError, match="holds a run already"):
        run(recipe(tmp_path))


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    def again(step):
        with pytest.raises(ValueError, match="another process"):
            run(recipe(tmp_path), resume=True)

    assert run(recipe(tmp_path, train__steps=1), notes=Notes(again)).status == "finished"


def test_a_mistake_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="trains a decoder"):
        run(recipe(tmp_path / "run", model__shape="encoder"))
    assert not (tmp_path / "run").exists()


def test_a_damaged_newest_checkpoint_is_named_and_the_run_is_the_same(tmp_path, whole):
    run(recipe(tmp_path), notes=Notes(StopAt(7)))
    file = tmp_path / "checkpoints" / "step-00000007" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    notes = Notes()
    run(recipe(tmp_path), resume=True, notes=notes)
    assert "step-00000007 is damaged" in notes.said[0]
    assert "optimizer.safetensors" in notes.said[0]
    assert min(notes.losses) == 7
    assert same(weights(tmp_path), weights(whole[1]))
    assert lines(tmp_path) == lines(whole[1])


def test_retention_keeps_the_best(tmp_path):
    validation, worse = Trainer.validation_loss, iter(range(99))
    Trainer.validation_loss = lambda *given: validation(*given) + next(worse)
    try:
        run(recipe(tmp_path, train__steps=20, optimizer__lr=1e-9))
    finally:
        Trainer.validation_loss = validation
    assert [step for step, _ in checkpoints(tmp_path / "checkpoints")] == [4, 18, 20]


def test_a_full_disk_ends_the_run_with_its_last_checkpoint_whole(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"step 6 cannot be written.*newest whole one is step-00000004"):
        run(recipe(tmp_path), notes=Notes(lambda step: step == 5 and monkeypatch.setattr(state, "save_file", full)))
    monkeypatch.undo()
    assert run(recipe(tmp_path), resume=True).status == "finished"


def test_a_step_that_is_not_finite_changes_nothing_and_is_named(tmp_path):
    notes = Notes()
    result = run(recipe(tmp_path, save__every=1, save__keep=99), notes=notes, break_at=(4,))
    assert (result.status, result.skips) == ("finished", 1)
    before, after = (load_file(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (4, 5))
    assert same(before, after)
    said = [sentence for sentence in notes.said if "skipped" in sentence]
    assert len(said) == 1
    assert "step 5" in said[0]
    assert "the loss" in said[0]
    assert "the gradient of" in said[0]
    assert math.isinf(notes.losses[5])


def test_a_gradient_that_is_not_finite_is_named_where_the_loss_is_fine(tmp_path):
    model = build_model(recipe(tmp_path), MATERIAL)
    trainer = Trainer(model, recipe(tmp_path), 9)
    name = "decoder.blocks.1.attention.out.weight"
    dict(model.named_parameters())[name].register_hook(lambda gradient: gradient * math.inf)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    batches, count = StepBatches(training_runs.Documents(), accumulation_steps=1, workers=0, device="cpu").take(0)
    result = trainer.train_step(0, batches, count).result()
    assert math.isfinite(result.loss)
    assert result.not_finite == (f"the gradient of {name}",)
    assert same(before, model.state_dict())
    assert not any(tensor.any() for state in trainer.optimizer.state.values() for tensor in state.values())


def test_too_many_skips_end_the_run_cleanly(tmp_path):
    notes = Notes()
    result = run(recipe(tmp_path, train__max_skips=2), notes=notes, break_at=range(3, 99))
    assert (result.status, result.exit_code, result.step, result.skips) == ("diverged", 1, 6, 3)
    assert not (tmp_path / "model").exists()
    assert "max_skips" in notes.said[-1]
    saved = load_file(tmp_path / "checkpoints" / "step-00000006" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    again = run(recipe(tmp_path, train__max_skips=2), resume=True)
    assert (again.status, again.step) == ("diverged", 6)
    assert run(recipe(tmp_path, train__max_skips=3), resume=True).status == "finished"


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    notes = Notes()
    result = run(recipe(tmp_path, optimizer__lr=1e38, train__steps=2), notes=notes)
    assert result.status == "diverged"
    assert not (tmp_path / "model").exists()
    for _, place in checkpoints(tmp_path / "checkpoints"):
        assert all(tensor.isfinite().all() for tensor in load_file(place / "model.safetensors").values())


def gradients(tmp_path, batches, **changes):
    made = recipe(tmp_path, model__dropout={}, **changes)
    trainer = Trainer(build_model(made, MATERIAL).double(), made, 9)
    norm = trainer.forward_backward(0, batches, sum(batch.count for batch in batches))
    return norm, {name: weight.grad for name, weight in trainer.model.named_parameters()}


def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    """Of parts that predict different numbers of tokens; in float64, so that only rounding is left."""
    whole = training_runs.Documents()[1]
    weights = whole.weights.clone()
    weights[2, :9] = 0.0
    fields = {"tokens": whole.tokens, "targets": whole.targets, "document_ids": whole.document_ids, "weights": weights}
    parts = [phasor_batch(fields, slice(0, 2)), phasor_batch(fields, slice(2, 3))]
    once, by_once = gradients(tmp_path, [phasor_batch(fields, slice(None))])
    parted, by_parts = gradients(tmp_path, parts)
    torch.testing.assert_close(once, parted, rtol=1e-6, atol=0)  # the loss itself is added up in float32
    for name, gradient in by_once.items():
        torch.testing.assert_close(by_parts[name], gradient)


def phasor_batch(fields, rows):
    return training_runs.Batch(**{name: tensor[rows] for name, tensor in fields.items()})


def test_checkpointed_activations_give_the_same_gradients(tmp_path):
    experts = {"activation": "swiglu", "experts": {"num_experts": 4}}
    batches = [training_runs.Documents()[1]]
    for changes in ({}, {"model__feedforward": experts}):
        _, kept = gradients(tmp_path, batches, **changes)
        _, again = gradients(tmp_path, batches, train__activation_checkpointing=True, **changes)
        for name, gradient in kept.items():
            torch.testing.assert_close(again[name], gradient)


def test_gradients_are_clipped_to_their_norm(tmp_path):
    made = recipe(tmp_path, model__dropout={}, train__max_grad_norm=0.01)
    trainer = Trainer(build_model(made, MATERIAL), made, 9)
    result = trainer.train_step(0, [training_runs.Documents()[0]], 48.0).result()
    assert result.grad_norm > 0.01
    clipped = torch.cat([weight.grad.flatten() for weight in trainer.parameters.values()]).norm()
    # clip_grad_norm_ divides by the norm and 1e-6.
    assert float(clipped) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_run_resumes_too(tmp_path):
    for name, stop in (("whole", 99), ("stopped", 5)):
        run(recipe(tmp_path / name, train__compile=True), notes=Notes(StopAt(stop)))
    run(recipe(tmp_path / "stopped", train__compile=True), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


@pytest.mark.parametrize("name", ["gpt-2", "llama-3.1", "palm", "grok-1", "bloom", "mpt"])
def test_presets_take_fields_at_any_depth(tmp_path, name):
    made = recipe(tmp_path, model={"preset": name, "dim": 32, "num_heads": 4, "num_layers": 1,
                                   "position": {"kind": "rotary", "base": 500.0}})  # fmt: skip
    config = model_config(made, 60)
    assert (config.vocab_size, config.position.base) == (60, 500.0)
    assert config.norm == phasor.preset(name).norm


def test_a_model_that_does_not_fit_is_refused_in_a_sentence(tmp_path):
    for changes, message in [
        ({"model": {"preset": "bert"}}, "trains a decoder, and this model is an encoder"),
        ({"model__vocab_size": 5}, "the tokenizer has 23 tokens"),
        ({"model__head": "none"}, "needs a head"),
        ({"model__position": "learned", "model__max_length": 31}, "allows 31 tokens"),
        ({"model__dim": "wide"}, "an integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_model(recipe(tmp_path, **changes), MATERIAL)


def test_fine_tuning_begins_with_the_weights_of_a_folder(tmp_path, whole):
    made = recipe(tmp_path, init_from=str(whole[1] / "model"), model={"dropout": {"residual": 0.3}})
    model = build_model(made, MATERIAL)
    assert same(model.state_dict(), weights(whole[1]))
    assert model.config.dropout.residual == 0.3
    for changes, message in [
        ({"model": {"dim": 48}}, "do not fit the recipe's model"),
        ({"model": {"preset": "gpt-2"}}, "leave model.preset out"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_model(recipe(tmp_path, init_from=str(whole[1] / "model"), **changes), MATERIAL)


@pytest.mark.parametrize("task", ["lm", "mlm", "translation"])
def test_every_task_trains_on_files_and_resumes(tmp_path, task):
    name = "a.tsv" if task == "translation" else "a.txt"
    words = ["one", "two", "three", "four", "five"]
    text = [f"{a} and {b}\t{b} {a}" for a in words for b in words]
    (tmp_path / name).write_text("\n".join(text) + "\n")
    data = {"train": str(tmp_path / name), "tokenizer": "bytes", "sequence_length": 48, "validation_fraction": 0.2}
    data |= {"document": "line"} if task != "translation" else {}
    given = {"task": task, "data": data, "train__steps": 6, "train__batch_tokens": 96}
    folders = tmp_path / "whole", tmp_path / "stopped"
    for folder, stop in zip(folders, (99, 3), strict=True):
        result = loop.train(recipe(folder, **given), progress=Notes(StopAt(stop)))
    assert result.status == "interrupted"
    result = loop.train(recipe(folders[1], **given), resume=True, progress=Notes())
    assert result.status == "finished"
    assert same(weights(folders[0]), weights(folders[1]))
    assert lines(folders[0]) == lines(folders[1])
    assert (folders[0] / "samples.txt").exists() == (task != "mlm")
    (tmp_path / name).write_text("\n".join(text[:-9]) + "\n")


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with everything imported."""
    return forkserver()


def start_run(processes, made, *, resume, folder, slow=0.01):
    process = processes.Process(
        target=training_runs.run_alone, args=(made.to_json(), resume, slow, str(folder / "step.json"))
    )
    process.start()
    return process


def kill_until_done(processes, tmp_path, kills, seed, **changes):
    """Kill a run at random moments, then let it end: the kills, and those in the writing of a checkpoint."""
    made, stamp = recipe(tmp_path / "run", save__every=1, save__keep=1, **changes), tmp_path / "step.json"
    draw, killed, writing = random.Random(seed), 0, 0
    for _ in range(kills):
        stamp.unlink(missing_ok=True)
        process = start_run(processes, made, resume=is_run(tmp_path / "run"), folder=tmp_path, slow=0.02)
        early = draw.random() < 0.2  # some kills fall before the first step
        while process.is_alive() and not stamp.exists() and not early:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        writing += bool(list((tmp_path / "run").glob("checkpoints/.*.part")))
    last = start_run(processes, made, resume=is_run(tmp_path / "run"), folder=tmp_path)
    last.join()
    assert last.exitcode == 0
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    return killed, writing


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_resumes_as_if_it_had_not_been(tmp_path, whole, processes, seed):
    assert kill_until_done(processes, tmp_path, 2, seed)[0] == 2
    assert same(weights(tmp_path / "run"), weights(whole[1]))
    assert lines(tmp_path / "run") == lines(whole[1])


@pytest.mark.slow
def test_a_run_killed_ten_times_resumes_as_if_it_had_not_been(tmp_path, processes):
    run(recipe(tmp_path / "whole", train__steps=60))
    killed, writing = kill_until_done(processes, tmp_path, 10, 2, train__steps=60)
    assert killed == 10
    assert writing > 0
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_asked_to_stop_saves_and_exits_with_its_code(tmp_path, whole, processes, number, code):
    made = recipe(tmp_path / "run", save__every=99, train__evaluate_every=99, data__workers=2)
    process = start_run(processes, made, resume=False, folder=tmp_path, slow=0.05)
    deadline = time.monotonic() + 120
    while not (tmp_path / "step.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1
    assert run(recipe(tmp_path / "run"), resume=True).status == "finished"
    assert same(weights(tmp_path / "run"), weights(whole[1]))


@pytest.mark.parametrize("stop", [3, 7], ids=["before the first checkpoint", "after it"])
def test_events_have_every_step_once_after_a_run_was_cut_off(tmp_path, stop, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read by this number, as text: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))

    class Killed(BaseException):
        """What no handler of the run takes for its own."""

    def kill(step):
        if step == stop:
            raise Killed

    with pytest.raises(Killed):
        run(recipe(tmp_path, save__every=4), notes=Notes(kill))
    run(recipe(tmp_path, save__every=4), resume=True)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 13))


def test_the_speed_is_that_of_the_steps_since_the_last_line(tmp_path, monkeypatch):
    now, speeds, count = [0.0], {}, []
    train_step, validation_loss, save = Trainer.train_step, Trainer.validation_loss, Trainer.save

    def take(seconds, method):
        def run_slowly(self, *given):
            now[0] += seconds(*given)
            return method(self, *given)

        return run_slowly

    def step_seconds(step, batches, tokens):
        count.append(tokens)
        return 2.0 if step < 6 else 8.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "train_step", take(step_seconds, train_step))
    monkeypatch.setattr(Trainer, "validation_loss", take(lambda *given: 100.0, validation_loss))
    monkeypatch.setattr(Trainer, "save", take(lambda *given: 1000.0, save))
    notes = Notes()
    monkeypatch.setattr(notes, "on_step", lambda report: speeds.update({report.step: report.tokens_per_second}))
    run(recipe(tmp_path, train__log_every=3, train__steps=10, train__evaluate_every=2), notes=notes)
    expected = {}
    for step in range(1, 11):
        window = range((step - 1) // 3 * 3, step)  # the steps since the last line
        expected[step] = sum(count[i] for i in window) / sum(2.0 if i < 6 else 8.0 for i in window)
    assert speeds == pytest.approx(expected)
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["tokens_per_second"] for line in read if "loss" in line}
    assert logged == pytest.approx({step: expected[step] for step in (3, 6, 9, 10)}, abs=0.05)  # rounded to tenths


def test_validation_is_reported_batch_by_batch(tmp_path, monkeypatch):
    notes, reports = Notes(), []
    monkeypatch.setattr(notes, "on_prepare", lambda *report: reports.append(report))
    run(recipe(tmp_path, train__steps=4), notes=notes)
    assert reports == [("validating", index, 4) for index in range(4)]
