"""The training loop: step, log, evaluate, save, until the last step, a signal, or too many skipped steps."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from phasor.config.recipe import Recipe
from phasor.data.prefetch import StepBatches
from phasor.device import deterministic_algorithms, resolve_device
from phasor.training.build import build_model, check_model
from phasor.training.datasets import Datasets, load_datasets
from phasor.training.progress import StepReport, TrainingProgress
from phasor.training.result import Status, TrainingResult
from phasor.training.run import RunFolder, choose_run_folder
from phasor.training.samples import sample_text
from phasor.training.signals import StopSignal
from phasor.training.state import (
    NotSavedError,
    TrainingState,
    describe_changes,
    load_newest,
    newest_whole,
    prune,
    remove_leftovers,
    rename_damaged_checkpoints,
    save_state,
)
from phasor.training.trainer import StepHandle, StepResult, Trainer

VALIDATION_BATCHES = 64  # the most that a run evaluates; `evaluate` takes them all
# What may not change in a run that is resumed: the order of the data and what is saved follow from these.
FIXED = ("seed", "batch_tokens", "gradient_accumulation_steps", "ema_decay")
FREE_DATA = ("cache", "workers")
# What a checkpoint holds beside the tensors.
SAVED = ("step", "skips", "tokens", "evaluated", "loss", "validation_loss", "best_loss", "best_step")


def train(recipe: Recipe, resume: bool = False, progress: TrainingProgress | None = None) -> TrainingResult:
    """Train what a recipe describes, and leave a run folder: recipe, metrics, checkpoints, a plot and the model.

    With `resume` a run continues from its newest whole checkpoint, and its weights become, bit by bit, those of a run
    that was never stopped; on a GPU that takes `train.deterministic`. Ctrl-C and SIGTERM save a checkpoint and end the
    run.

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
    ...     result.status, Path(folder, "run", "model", "model.safetensors").exists()
    ('finished', True)
    """
    progress = TrainingProgress() if progress is None else progress
    device = resolve_device(recipe.train.device)
    check_model(recipe)
    run_folder = RunFolder(choose_run_folder(recipe, resume), recipe, resume=resume)
    exact = deterministic_algorithms(recipe.train.deterministic)
    with StopSignal() as stop, fork_generators(device), exact, run_folder as run:
        run.notify = progress.on_message
        state = load_newest(run.checkpoints, run.notify) if resume else None
        if resume and state is None:
            run.notify(f"{run.path} has no checkpoint to resume: the run starts from the beginning")
        if state is not None:
            check_same(state.values["fixed"], fixed_fields(recipe), run.path)
        fingerprint = None if state is None else state.values["fixed"]["tokens"]
        datasets = load_datasets(recipe, run.path, progress.on_prepare, fingerprint, run.notify)
        if datasets.skipped:
            run.notify(
                f"{datasets.skipped} pairs with more than {recipe.data.sequence_length} tokens on a side are left out"
            )
        model = build_model(recipe, datasets)
        trainer = Trainer(model, recipe, recipe.train.num_steps(datasets.train.per_epoch))
        try:
            return TrainingLoop(trainer, datasets, run, stop, progress).run_from(state)
        except (OSError, SafetensorError) as error:  # the latter is what a full disk raises under safetensors
            raise write_error(error, run) from None


def write_error(error: Exception, run: RunFolder) -> OSError:
    """The error of a disk that cannot be written, with the folder and what there is to resume from."""
    if isinstance(error, NotSavedError):
        return error
    newest = newest_whole(run.checkpoints)
    left = "it has no checkpoint yet" if newest is None else f"its newest whole checkpoint is {newest[1].name}"
    return OSError(f"{run.path} cannot be written: {getattr(error, 'strerror', None) or error}; {left}")


@contextlib.contextmanager
def fork_generators(device: torch.device) -> Any:
    """Leave the random generators of torch as they were before a run."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def fixed_fields(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe has to be the same in a run that is resumed, besides the model."""
    fields = recipe.to_dict()
    return {
        "task": recipe.task,
        "data": {name: value for name, value in fields["data"].items() if name not in FREE_DATA},
        "train": {name: fields["train"][name] for name in FIXED},
    }


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse to resume where something is no longer what it was."""
    changed = describe_changes({name: before.get(name) for name in now}, now)
    if changed:
        listed = "; ".join(changed[:5]) + (f"; and {n} more" if (n := len(changed) - 5) > 0 else "")
        raise ValueError(f"{folder} cannot be resumed with another recipe: {listed}")


class TrainingLoop:
    """A run in progress: the counters that are saved with the tensors, and the clock."""

    def __init__(
        self, trainer: Trainer, datasets: Datasets, folder: RunFolder, stop: StopSignal, progress: TrainingProgress
    ) -> None:
        self.trainer, self.datasets, self.folder = trainer, datasets, folder
        self.stop, self.progress = stop, progress
        self.recipe, self.steps = trainer.recipe, trainer.steps
        self.step = self.skips = self.tokens = 0
        self.evaluated = self.saved = -1  # the last steps with an evaluation and a checkpoint
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.pending: tuple[StepHandle, float] | None = None  # a step not waited for, and its tokens
        self.before = 0.0  # seconds that earlier parts of the run took
        self.began = time.perf_counter()
        self.first, self.busy = 0, 0.0  # the step this process began at, and its seconds in model and optimizer

    def run_from(self, state: TrainingState | None) -> TrainingResult:
        """Run to the end, from a checkpoint or from the beginning."""
        if state is not None:
            self.restore(state)
        remove_leftovers(self.folder.checkpoints)
        self.folder.start(self.step)
        data, device = self.recipe.data, self.trainer.device
        accumulation_steps = self.recipe.train.gradient_accumulation_steps
        batches = StepBatches(
            self.datasets.train, accumulation_steps=accumulation_steps, workers=data.workers, device=device
        )
        self.stop.graceful = True
        self.began, self.first = time.perf_counter(), self.step
        try:
            status = self.run(batches)
            seconds = time.perf_counter() - self.began
            overhead = max(0.0, 1 - self.busy / seconds) if self.step > self.first else 0.0
            return self.finish(status, self.before + seconds, overhead)
        finally:
            batches.close()

    def run(self, batches: StepBatches) -> Status:
        """Train, evaluate and save until the run ends, and how it ended."""
        while True:
            if self.evaluation_due():
                self.evaluate()
            last = self.step >= self.steps
            if self.skips > self.recipe.train.max_skips:
                self.save()
                self.folder.notify(f"{self.skips} steps were skipped, more than train.max_skips: the run ends here")
                return "diverged"
            if (last or self.stop.requested or self.save_due()) and not self.save():
                return "diverged"
            if self.stop.requested:
                self.folder.notify(f"stopped at step {self.step} of {self.steps}, which is saved; resume to continue")
                return "interrupted"
            if last:
                return "finished" if self.validation_loss is None or math.isfinite(self.validation_loss) else "diverged"
            self.train_step(batches)

    def train_step(self, batches: StepBatches) -> None:
        """One optimizer step; on a GPU the host does not wait for it."""
        step_batches, count = batches.take(self.step)
        started = time.perf_counter()
        handle = self.trainer.train_step(self.step, step_batches, count)
        self.busy += time.perf_counter() - started
        if self.step + 1 < self.steps:
            batches.prefetch(self.step + 1)  # while a GPU is busy with the step
        self.finish_step()
        self.step += 1
        self.tokens += int(count)
        self.pending = handle, count
        if self.trainer.device.type == "cpu" or self.due():
            self.finish_step()

    def finish_step(self) -> None:
        """Wait for the last step if it was not waited for, and log it."""
        if self.pending is not None:
            (handle, count), self.pending = self.pending, None
            started = time.perf_counter()
            result = handle.result()
            self.busy += time.perf_counter() - started
            self.log_step(result, count)

    def due(self) -> bool:
        """Whether something is to be done after this step that has to know what came of it."""
        return self.step >= self.steps or self.stop.requested or self.evaluation_due() or self.save_due()

    def log_step(self, result: StepResult, count: float) -> None:
        """Report a step, and log it every `log_every` of them."""
        self.loss = result.loss
        if result.not_finite:
            self.skips += 1
            wrong = result.not_finite
            names = ", ".join(wrong[:3]) + (f" and {n} more" if (n := len(wrong) - 3) > 0 else "")
            self.folder.notify(f"step {self.step} is skipped, and no weight changed: not finite are {names}")
            self.folder.log(self.step, skipped=list(wrong))
        seconds = time.perf_counter() - self.began
        each = seconds / (self.step - self.first)
        report = StepReport(
            self.step, self.steps, result.loss, result.lr, count / each, each * (self.steps - self.step)
        )
        self.progress.on_step(report)
        if not result.not_finite and (self.step % self.recipe.train.log_every == 0 or self.step == self.steps):
            speed = round(report.tokens_per_second, 1)
            values = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
            self.folder.log(self.step, **values, tokens=self.tokens, tokens_per_second=speed)

    def evaluation_due(self) -> bool:
        """Whether this step ends with an evaluation that is not done yet."""
        every = self.recipe.train.evaluate_every
        due = self.step > 0 and (self.step % every == 0 or self.step >= self.steps)
        return due and self.evaluated != self.step and self.datasets.valid.per_epoch > 0

    def evaluate(self) -> None:
        """Compute the validation loss, unless a signal comes in between."""
        started = time.perf_counter()
        batches = (self.datasets.valid[i] for i in range(min(VALIDATION_BATCHES, self.datasets.valid.per_epoch)))
        loss = self.trainer.validation_loss(batches, lambda: self.stop.requested)
        self.busy += time.perf_counter() - started
        if loss is None:
            return
        self.evaluated, self.validation_loss = self.step, loss
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step = loss, self.step
        self.folder.log(self.step, validation_loss=loss)
        self.progress.on_evaluation(self.step, loss)

    def save_due(self) -> bool:
        """Whether this step ends with a checkpoint."""
        return self.step > 0 and (self.step % self.recipe.save.every == 0 or self.best_step == self.step)

    def save(self) -> bool:
        """Write a checkpoint unless this step has one; False where weights are not finite and nothing is written."""
        self.finish_step()
        if self.saved == self.step:
            return True
        wrong = self.trainer.non_finite_weights()
        if wrong:
            self.folder.notify(
                f"at step {self.step} weights are not finite ({', '.join(wrong[:3])}): they are not saved"
            )
            return False
        save_state(self.folder.checkpoints, self.step, self.trainer.tensors(), self.values())
        self.saved = self.step
        prune(self.folder.checkpoints, self.recipe.save.keep, self.best_step)
        return True

    def values(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {name: getattr(self, name) for name in SAVED} | {
            "ema_updates": 0 if self.trainer.ema is None else self.trainer.ema.updates,
            "seconds": self.before + time.perf_counter() - self.began,
            "fixed": self.fixed_values(),
            "special": self.trainer.model.special.to_dict(),
        }

    def fixed_values(self) -> dict[str, Any]:
        """What has to be the same in a run that is resumed."""
        own = {"model": self.trainer.model.config.to_dict(), "tokens": self.datasets.fingerprint}
        return fixed_fields(self.recipe) | own

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint, or refuse one of another model or other data."""
        check_same(state.values["fixed"], self.fixed_values(), self.folder.path)
        self.trainer.restore(state)
        for name in SAVED:
            setattr(self, name, state.values[name])
        self.saved, self.before = self.step, state.values["seconds"]
        rename_damaged_checkpoints(self.folder.checkpoints, self.step)
        self.folder.notify(f"resuming from {state.folder.name} of {self.steps} steps")

    def finish(self, status: Status, seconds: float, overhead: float) -> TrainingResult:
        """Write the model, a sample and the plot of the losses, and report how the run ended."""
        sample = None
        if status == "finished":
            with self.trainer.eval_mode():
                sample = sample_text(self.trainer.model, self.recipe, self.datasets)
                self.folder.finish(self.trainer.model, sample)
        self.folder.plot()
        return TrainingResult(
            folder=self.folder.path,
            status=status,
            exit_code={"finished": 0, "diverged": 1, "interrupted": self.stop.exit_code}[status],
            step=self.step,
            steps=self.steps,
            loss=self.loss,
            validation_loss=self.validation_loss,
            best_loss=self.best_loss,
            best_step=self.best_step,
            skips=self.skips,
            seconds=seconds,
            overhead=overhead,
            sample=sample,
        )
