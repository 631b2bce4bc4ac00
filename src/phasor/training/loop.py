"""The loop: update, log, evaluate, save, until the last step, a signal, or too many updates that cannot be made."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from phasor.config.recipe import Recipe
from phasor.training.build import build_model, check_model
from phasor.training.datasets import Material, material
from phasor.training.prefetch import Feed
from phasor.training.progress import Report, Watcher
from phasor.training.result import Ending, Result
from phasor.training.run import Run, run_folder
from phasor.training.samples import sample_of
from phasor.training.signals import Stop
from phasor.training.state import (
    NotSavedError,
    State,
    changes,
    load_newest,
    newest_whole,
    prune,
    save_state,
    set_aside,
    sweep,
)
from phasor.training.trainer import Pending, Trainer, Update, device_of

VALIDATION_BATCHES = 64  # at most so many are measured during a run; `evaluate` takes them all
# What may not change in a run that is resumed: the order of the data and what is saved follow from these.
FIXED = ("seed", "batch_tokens", "gradient_accumulation_steps", "ema_decay")
FREE_DATA = ("cache", "workers")
KEPT = ("step", "skips", "tokens", "evaluated", "loss", "validation", "best", "best_step")  # numbers of a checkpoint


def train(recipe: Recipe, resume: bool = False, progress: Watcher | None = None) -> Result:
    """Train what a recipe describes, and leave a run folder: recipe, metrics, checkpoints, a plot and the model.

    With `resume` a run goes on from its newest whole checkpoint, and its weights become, bit by bit, those of a run
    that was never stopped. Ctrl-C and SIGTERM save a checkpoint and end the run.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "notes.txt").write_text("The cat sat on the mat. " * 200)
    ...     result = train(Recipe.from_dict({
    ...         "model": {"preset": "llama-2", "dim": 16, "num_heads": 2, "num_layers": 1},
    ...         "data": {"train": f"{folder}/notes.txt", "valid": f"{folder}/notes.txt", "tokenizer": "bytes"},
    ...         "train": {"steps": 2, "device": "cpu"},
    ...         "out": f"{folder}/run",
    ...     }))
    ...     result.ending, Path(folder, "run", "model", "model.safetensors").exists()
    ('finished', True)
    """
    watcher = Watcher() if progress is None else progress
    device = device_of(recipe.train.device)
    check_model(recipe)
    with Stop() as stop, own_generators(device), Run(run_folder(recipe, resume), recipe, resume=resume) as run:
        run.say = watcher.say
        state = load_newest(run.checkpoints, watcher.say) if resume else None
        if resume and state is None:
            watcher.say(f"{run.folder} has no checkpoint to resume: the run starts from the beginning")
        if state is not None:
            check_same(state.numbers["fixed"], asked_of(recipe), run.folder)
        known = None if state is None else state.numbers["fixed"]["tokens"]
        found = material(recipe, run.folder, watcher.preparing, known, watcher.say)
        if found.skipped:
            watcher.say(
                f"{found.skipped} pairs with more than {recipe.data.sequence_length} tokens on a side are left out"
            )
        model = build_model(recipe, found)
        trainer = Trainer(model, recipe, recipe.train.updates(found.train.per_epoch))
        try:
            return Loop(trainer, found, run, stop, watcher).run_from(state)
        except (OSError, SafetensorError) as error:  # the latter is what a full disk raises under safetensors
            raise not_written(error, run) from None


def not_written(error: Exception, run: Run) -> OSError:
    """A disk that cannot be written, with the folder and what there is to go on from."""
    if isinstance(error, NotSavedError):
        return error
    newest = newest_whole(run.checkpoints)
    left = "it has no checkpoint yet" if newest is None else f"its newest whole checkpoint is {newest[1].name}"
    return OSError(f"{run.folder} cannot be written: {getattr(error, 'strerror', None) or error}; {left}")


@contextlib.contextmanager
def own_generators(device: torch.device) -> Any:
    """Leave the generators of torch as they were before a run."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def asked_of(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe has to be the same in a run that is resumed, besides the model."""
    fields = recipe.to_dict()
    return {
        "task": recipe.task,
        "data": {name: value for name, value in fields["data"].items() if name not in FREE_DATA},
        "train": {name: fields["train"][name] for name in FIXED},
    }


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse to go on where something is no longer what it was."""
    changed = changes({name: before.get(name) for name in now}, now)
    if changed:
        shown = "; ".join(changed[:5]) + (f"; and {n} more" if (n := len(changed) - 5) > 0 else "")
        raise ValueError(f"{folder} cannot be resumed with another recipe: {shown}")


class Loop:
    """A run while it goes on: the numbers that are saved with the tensors, and the clock."""

    def __init__(self, trainer: Trainer, found: Material, run: Run, stop: Stop, watcher: Watcher) -> None:
        self.trainer, self.found, self.run, self.stop, self.watcher = trainer, found, run, stop, watcher
        self.recipe, self.steps = trainer.recipe, trainer.steps
        self.step = self.skips = self.tokens = 0
        self.evaluated = self.saved = -1  # the steps at which that was last done
        self.loss: float | None = None
        self.validation: float | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.pending: tuple[Pending, float] | None = None  # an update not waited for, and its tokens
        self.before = 0.0  # seconds that earlier parts of the run took
        self.began = time.perf_counter()
        self.first, self.inside = 0, 0.0  # the step this process began at, and its seconds in model and optimizer

    def run_from(self, state: State | None) -> Result:
        """Go on from a checkpoint, or begin."""
        if state is not None:
            self.restore(state)
        sweep(self.run.checkpoints)
        self.run.start(self.step)
        data, device = self.recipe.data, self.trainer.device
        accumulate = self.recipe.train.gradient_accumulation_steps
        feed = Feed(self.found.train, accumulate=accumulate, workers=data.workers, device=device)
        self.stop.gently = True
        self.began, self.first = time.perf_counter(), self.step
        try:
            ending = self.go(feed)
            seconds = time.perf_counter() - self.began
            outside = max(0.0, 1 - self.inside / seconds) if self.step > self.first else 0.0
            return self.end(ending, self.before + seconds, outside)
        finally:
            feed.close()

    def go(self, feed: Feed) -> Ending:
        """Until the end, whichever it is."""
        while True:
            if self.evaluation_due():
                self.evaluate()
            last = self.step >= self.steps
            if self.skips > self.recipe.train.max_skips:
                self.save()
                self.watcher.say(f"{self.skips} updates were skipped, more than train.max_skips: the run ends here")
                return "diverged"
            if (last or self.stop.asked or self.save_due()) and not self.save():
                return "diverged"
            if self.stop.asked:
                self.watcher.say(f"stopped at step {self.step} of {self.steps}, which is saved; resume to go on")
                return "interrupted"
            if last:
                return "finished" if self.validation is None or math.isfinite(self.validation) else "diverged"
            self.advance(feed)

    def advance(self, feed: Feed) -> None:
        """One update; on a GPU the host goes on before it is through."""
        batches, count = feed.take(self.step)
        started = time.perf_counter()
        pending = self.trainer.update(self.step, batches, count)
        self.inside += time.perf_counter() - started
        if self.step + 1 < self.steps:
            feed.prepare(self.step + 1)  # while a GPU is busy with the update
        self.settle()
        self.step += 1
        self.tokens += int(count)
        self.pending = pending, count
        if self.trainer.device.type == "cpu" or self.due():
            self.settle()

    def settle(self) -> None:
        """Wait for the last update that was not waited for, and tell of it."""
        if self.pending is not None:
            (pending, count), self.pending = self.pending, None
            started = time.perf_counter()
            update = pending.update()
            self.inside += time.perf_counter() - started
            self.report(update, count)

    def due(self) -> bool:
        """Whether something is to be done after this step that has to know what came of it."""
        return self.step >= self.steps or self.stop.asked or self.evaluation_due() or self.save_due()

    def report(self, update: Update, count: float) -> None:
        """Tell of an update, and log it when it is time."""
        self.loss = update.loss
        if update.wrong:
            self.skips += 1
            names = ", ".join(update.wrong[:3]) + (f" and {n} more" if (n := len(update.wrong) - 3) > 0 else "")
            self.watcher.say(f"step {self.step} is skipped, and no weight changed: not finite are {names}")
            self.run.log(self.step, skipped=list(update.wrong))
        seconds = time.perf_counter() - self.began
        each = seconds / (self.step - self.first)
        report = Report(self.step, self.steps, update.loss, update.rate, count / each, each * (self.steps - self.step))
        self.watcher.stepped(report)
        if not update.wrong and (self.step % self.recipe.train.log_every == 0 or self.step == self.steps):
            speed = round(report.tokens_per_second, 1)
            values = {"loss": update.loss, "rate": update.rate, "norm": update.norm}
            self.run.log(self.step, **values, tokens=self.tokens, tokens_per_second=speed)

    def evaluation_due(self) -> bool:
        every = self.recipe.train.evaluate_every
        due = self.step > 0 and (self.step % every == 0 or self.step >= self.steps)
        return due and self.evaluated != self.step and self.found.valid.per_epoch > 0

    def evaluate(self) -> None:
        """Measure the validation loss, unless a signal comes in between."""
        started = time.perf_counter()
        batches = (self.found.valid[i] for i in range(min(VALIDATION_BATCHES, self.found.valid.per_epoch)))
        loss = self.trainer.validation(batches, lambda: self.stop.asked)
        self.inside += time.perf_counter() - started
        if loss is None:
            return
        self.evaluated, self.validation = self.step, loss
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_step = loss, self.step
        self.run.log(self.step, validation=loss)
        self.watcher.evaluated(self.step, loss)

    def save_due(self) -> bool:
        return self.step > 0 and (self.step % self.recipe.save.every == 0 or self.best_step == self.step)

    def save(self) -> bool:
        """Write a checkpoint unless this step has one; False where weights are not finite and nothing is written."""
        self.settle()
        if self.saved == self.step:
            return True
        wrong = self.trainer.not_finite()
        if wrong:
            self.watcher.say(f"at step {self.step} weights are not finite ({', '.join(wrong[:3])}): they are not saved")
            return False
        save_state(self.run.checkpoints, self.step, self.trainer.tensors(), self.numbers())
        self.saved = self.step
        prune(self.run.checkpoints, self.recipe.save.keep, self.best_step)
        return True

    def numbers(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {name: getattr(self, name) for name in KEPT} | {
            "ema_updates": 0 if self.trainer.ema is None else self.trainer.ema.updates,
            "seconds": self.before + time.perf_counter() - self.began,
            "fixed": self.fixed(),
            "special": self.trainer.model.special.to_dict(),
        }

    def fixed(self) -> dict[str, Any]:
        """What has to be the same in a run that is resumed."""
        own = {"model": self.trainer.model.config.to_dict(), "tokens": self.found.fingerprint}
        return asked_of(self.recipe) | own

    def restore(self, state: State) -> None:
        """Take over a checkpoint, or refuse one of another model or other data."""
        check_same(state.numbers["fixed"], self.fixed(), self.run.folder)
        self.trainer.restore(state)
        for name in KEPT:
            setattr(self, name, state.numbers[name])
        self.saved, self.before = self.step, state.numbers["seconds"]
        set_aside(self.run.checkpoints, self.step)
        self.watcher.say(f"going on from {state.folder.name} of {self.steps} steps")

    def end(self, ending: Ending, seconds: float, outside: float) -> Result:
        """Leave the folder as a run that ended so leaves it."""
        sample = None
        if ending == "finished":
            with self.trainer.measuring():
                sample = sample_of(self.trainer.model, self.recipe, self.found)
                self.run.finish(self.trainer.model, sample)
        self.run.plot()
        return Result(
            folder=self.run.folder,
            ending=ending,
            exit_code={"finished": 0, "diverged": 1, "interrupted": self.stop.exit_code}[ending],
            step=self.step,
            steps=self.steps,
            loss=self.loss,
            validation=self.validation,
            best=self.best,
            best_step=self.best_step,
            skips=self.skips,
            seconds=seconds,
            outside=outside,
            sample=sample,
        )
