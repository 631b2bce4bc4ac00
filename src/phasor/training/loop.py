"""The training loop: step, log, evaluate, save, until the last step, a signal, or too many skipped steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from phasor.adapters import DEFAULT
from phasor.checkpoints.adapter_folder import describe_adapter
from phasor.checkpoints.runs import checkpoint_name
from phasor.config.model import Shape
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.prefetch import StepBatches
from phasor.device import deterministic_algorithms, resolve_device
from phasor.parallel.processes import JoinedProcesses, Processes, join_processes
from phasor.training.build import build_model, check_model, outline_model, rebuild_model
from phasor.training.checks import check_device, check_recipe
from phasor.training.datasets import Datasets, follow_datasets, load_datasets
from phasor.training.follower import FollowerRunFolder, SilentProgress
from phasor.training.loggers import Logger, loggers_of
from phasor.training.progress import RunSummary, StepReport, TrainingProgress
from phasor.training.result import Status, TrainingResult
from phasor.training.resume import (
    check_same,
    check_steps_left,
    comparable,
    fixed_fields,
    is_restarted,
    models_of,
    pin_models,
    shared_state,
    with_models,
)
from phasor.training.run import RunFolder, choose_run_folder
from phasor.training.sharded import ShardedTrainer
from phasor.training.signals import SharedStopSignal, StopSignal
from phasor.training.state import (
    NotSavedError,
    TrainingState,
    describe_remaining,
    prune,
    read_checkpoint,
    rename_damaged_checkpoints,
    unusable_reason,
)
from phasor.training.trainer import StepHandle, StepResult, Trainer, precision_name

VALIDATION_BATCHES = 64  # the most that a run evaluates; `evaluate` takes them all
RESUME = "; resuming continues from the newest checkpoint"
# What a checkpoint holds beside the tensors.
SAVED = (
    *("step", "skips", "tokens", "evaluated", "loss", "validation_loss"),
    *("best_loss", "best_step", "evaluations_since_best"),
)


def train(
    recipe: Recipe,
    resume: bool = False,
    progress: TrainingProgress | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    loggers: Sequence[Logger] = (),
) -> TrainingResult:
    """Train what a recipe describes, and leave a run folder: recipe, metrics, checkpoints, a plot and the model.

    The folder is new, empty, or a run's own. With `resume` a run continues from its newest whole checkpoint, and its
    weights become, bit by bit, those of a run that was never stopped; on a GPU that takes `train.deterministic`. With
    `overwrite` a run that is there is deleted when the new one begins. `dry_run` prepares everything, reports it to
    `progress.on_start` and leaves nothing. Ctrl-C and SIGTERM save a checkpoint and end the run. `loggers` get the
    metrics besides those of the recipe.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "notes.txt").write_text("The cat sat on the mat. " * 200)
    ...     result = train(Recipe.from_dict({
    ...         "model": {"preset": "llama-2", "dim": 16, "num_heads": 2, "num_layers": 1},
    ...         "data": {"train": f"{folder}/notes.txt", "valid": f"{folder}/notes.txt", "tokenizer": "bytes"},
    ...         "train": {"steps": 2, "device": "cpu"},
    ...         "schedule": {"kind": "constant", "warmup": 0},
    ...         "out": f"{folder}/run",
    ...     }))
    ...     result.status, Path(folder, "run", "model", "model.safetensors").exists()
    ('finished', True)
    """
    check_recipe(recipe)
    if resume and overwrite:
        raise ValueError("a run is resumed or overwritten, not both")
    progress = TrainingProgress() if progress is None else progress
    with join_processes(recipe.parallel, recipe.train.device, RESUME) as processes:
        if processes.restarts and is_restarted(recipe, processes):
            resume, overwrite = True, False
        if any(models_of(recipe)):
            names = models_of(pin_models(recipe, resume)) if processes.is_first else ()
            recipe = with_models(recipe, processes.from_first(names))
        return train_as(
            processes, recipe, resume, progress if processes.is_first else SilentProgress(), overwrite, dry_run, loggers
        )


def train_as(
    processes: Processes,
    recipe: Recipe,
    resume: bool,
    progress: TrainingProgress,
    overwrite: bool,
    dry_run: bool,
    loggers: Sequence[Logger],
) -> TrainingResult:
    """Train as one of some processes: the first one owns the run folder and prepares the data, the others follow."""
    device = resolve_device(recipe.train.device)
    check_device(recipe, device, processes)
    if not resume:
        check_model(recipe, processes.size)
    folder = Path(processes.from_first(str(choose_run_folder(recipe, resume))))
    run_folder = (RunFolder if processes.is_first else FollowerRunFolder)(
        folder, recipe, resume=resume, overwrite=overwrite
    )
    if processes.is_first:
        run_folder.loggers.loggers += loggers_of(recipe, loggers, progress.on_message)
    exact = deterministic_algorithms(recipe.train.deterministic)
    joined = processes if isinstance(processes, JoinedProcesses) else None
    stop_signal = StopSignal() if joined is None else SharedStopSignal()
    with stop_signal as stop, fork_generators(device), exact, run_folder as run:
        run.notify = progress.on_message
        if joined is not None:
            token = joined.from_first(run.write_token() if joined.is_first else "")
            if isinstance(run, FollowerRunFolder):
                run.check_visible(token)
        state = shared_state(run, processes) if resume else None
        fingerprint = None if state is None else state.values["fixed"]["tokens"]
        shape = None if state is None else state.values["fixed"]["model"]["shape"]
        datasets = shared_datasets(run, processes, progress, fingerprint, shape)
        for skipped in datasets.left_out:
            run.notify(f"{skipped} are left out")
        if joined is not None:
            model, weights = outline_model(recipe, datasets, state, verify=joined.is_first)
        else:
            model = build_model(recipe, datasets) if state is None else rebuild_model(recipe, datasets, state)
        if state is None:
            run.keep_tokenizer(model)
        steps = recipe.train.num_steps(datasets.train.per_epoch)
        trainer = (
            Trainer(model, recipe, steps)
            if joined is None
            else ShardedTrainer(model, recipe, steps, joined, stop, weights)
        )
        start = None if state is None else partial(build_model, recipe, datasets)
        trainer.objective.prepare(trainer, datasets, run, progress.on_prepare, start)
        training = TrainingLoop(trainer, datasets, run, stop, progress, processes)
        if state is not None:
            training.restore(state)
            state.tensors.clear()  # which are mapped from the files of the checkpoint
        if (warmup := recipe.schedule.warmup) > trainer.steps:
            run.notify(
                f"schedule.warmup is {warmup}, and the run has {trainer.steps} steps: the learning rate does not reach "
                f"its peak of {recipe.optimizer.lr:g}"
            )
        progress.on_start(training.summary())
        if dry_run:
            run.undo()
            return TrainingResult(
                folder=run.path, status="dry run", exit_code=0, step=training.step, steps=training.steps
            )
        try:
            return training.run_to_end()
        except (OSError, SafetensorError) as error:  # the latter is what a full disk raises under safetensors
            raise write_error(error, run) from None


def shared_datasets(
    run: RunFolder, processes: Processes, progress: TrainingProgress, fingerprint: str | None, shape: Shape | None
) -> Datasets:
    """The data of a run: the first process prepares them, then the others open them."""
    if processes.is_first:
        datasets = load_datasets(run.recipe, run, progress.on_prepare, fingerprint, shape)
        processes.from_first(datasets.fingerprint)
        return datasets
    return follow_datasets(run.recipe, run, processes.from_first(""), shape)


def write_error(error: Exception, run: RunFolder) -> OSError:
    """The error of a disk that cannot be written, with the folder and what there is to resume from."""
    if isinstance(error, NotSavedError):
        return error
    left = describe_remaining(run.checkpoints)
    reason = getattr(error, "strerror", None) or str(error)
    what = reason if "cannot be read" in reason else f"{run.path} cannot be written: {reason}"
    return OSError(f"{what}; {left}")


@contextlib.contextmanager
def fork_generators(device: torch.device) -> Any:
    """Leave the random generators of torch as they were before a run."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


class TrainingLoop:
    """A run in progress: the counters that are saved with the tensors, and the clock."""

    def __init__(
        self,
        trainer: Trainer,
        datasets: Datasets,
        folder: RunFolder,
        stop: StopSignal,
        progress: TrainingProgress,
        processes: Processes | None = None,
    ) -> None:
        self.processes = Processes() if processes is None else processes
        self.trainer, self.datasets, self.folder = trainer, datasets, folder
        self.stop, self.progress = stop, progress
        self.recipe, self.steps = trainer.recipe, trainer.steps
        self.step = self.skips = self.tokens = 0
        self.evaluated = self.saved = -1  # the last steps with an evaluation and a checkpoint
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.evaluations_since_best = 0
        self.pending: StepHandle | None = None  # a step not waited for
        self.before = 0.0  # seconds that earlier parts of the run took
        self.began = time.perf_counter()
        self.first, self.busy = 0, 0.0  # the step this process began at, and its seconds in model and optimizer
        self.paused = 0.0  # seconds of this process in evaluations and checkpoints
        self.logged = 0, 0.0  # tokens, and seconds of training, when the last line was logged

    def summary(self) -> RunSummary:
        """What the run is about to do."""
        train, valid = self.datasets.sizes
        return RunSummary(
            folder=self.folder.path,
            parameters=self.trainer.num_parameters,
            vocab_size=self.trainer.model.config.vocab_size,
            train=train,
            valid=valid,
            device=" x ".join(filter(None, (str(self.trainer.device), str(self.processes)))),
            precision=precision_name(self.recipe, self.trainer.device),
            step=self.step,
            steps=self.steps,
            tokens_per_step=self.recipe.train.batch_tokens * self.recipe.train.gradient_accumulation_steps,
            sequence_length=self.recipe.data.sequence_length,
        )

    def run_to_end(self) -> TrainingResult:
        """Run to the end, from where the run stands."""
        self.folder.start(self.step)
        data, device = self.recipe.data, self.trainer.device
        accumulation_steps = self.recipe.train.gradient_accumulation_steps
        batches = StepBatches(
            self.datasets.train,
            accumulation_steps=accumulation_steps,
            workers=data.workers,
            device=device,
            share=self.processes.share,
        )
        self.stop.graceful = True
        self.began, self.first, self.logged = time.perf_counter(), self.step, (self.tokens, 0.0)
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
            ends = last or self.is_stale()
            if (ends or self.stop.requested or self.save_due()) and not self.save():
                return "diverged"
            if self.stop.requested:
                self.folder.notify(f"stopped at step {self.step} of {self.steps}, which is saved; resume to continue")
                return "interrupted"
            if ends:
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
        self.pending = handle
        if self.trainer.device.type == "cpu" or self.due():
            self.finish_step()

    def finish_step(self) -> None:
        """Wait for the last step if it was not waited for, and log it."""
        if self.pending is not None:
            handle, self.pending = self.pending, None
            started = time.perf_counter()
            result = handle.result()
            self.busy += time.perf_counter() - started
            if result.stop:
                self.stop.agree()
            self.log_step(result)

    def due(self) -> bool:
        """Whether something is to be done after this step that has to know what came of it."""
        return self.step >= self.steps or self.stop.requested or self.evaluation_due() or self.save_due()

    def log_step(self, result: StepResult) -> None:
        """Report a step, and log it every `log_every` of them; the speed is that since the last line was logged."""
        self.loss = result.loss
        if result.not_finite:
            self.skips += 1
            wrong = result.not_finite
            names = ", ".join(wrong[:3]) + (f" and {n} more" if (n := len(wrong) - 3) > 0 else "")
            self.folder.notify(f"step {self.step} is skipped, and no weight changed: not finite are {names}")
            self.folder.log(self.step, skipped=list(wrong))
        seconds = time.perf_counter() - self.began
        tokens, trained = self.tokens - self.logged[0], seconds - self.paused - self.logged[1]
        left = seconds / (self.step - self.first) * (self.steps - self.step)
        report = StepReport(self.step, self.steps, result.loss, result.lr, tokens / trained, left)
        self.progress.on_step(report)
        if not result.not_finite and (self.step % self.recipe.train.log_every == 0 or self.step == self.steps):
            speed = round(report.tokens_per_second, 1)
            self.logged = self.tokens, seconds - self.paused
            values = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
            self.folder.log(self.step, **values, **result.metrics, tokens=self.tokens, tokens_per_second=speed)

    def is_stale(self) -> bool:
        """Whether as many evaluations as `train.patience` allows have found no lower validation loss."""
        patience = self.recipe.train.patience
        return patience is not None and self.evaluations_since_best >= patience

    def evaluation_due(self) -> bool:
        """Whether this step ends with an evaluation that is not done yet."""
        every = self.recipe.train.evaluate_every
        due = self.step > 0 and (self.step % every == 0 or self.step >= self.steps)
        return due and self.evaluated != self.step and self.datasets.valid.per_epoch > 0

    def evaluate(self) -> None:
        """Compute the validation loss, unless a signal comes in between."""
        started = time.perf_counter()
        loss = self.trainer.validation_loss(self.validation_batches(), lambda: self.stop.requested)
        seconds = time.perf_counter() - started
        self.busy, self.paused = self.busy + seconds, self.paused + seconds
        if loss is None:
            return
        self.evaluated, self.validation_loss = self.step, loss
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.evaluations_since_best = loss, self.step, 0
        else:
            self.evaluations_since_best += 1
        self.folder.log(self.step, validation_loss=loss)
        self.progress.on_evaluation(self.step, loss)

    def validation_batches(self) -> Iterator[Batch]:
        """The batches that a run evaluates, reported one by one."""
        total = min(VALIDATION_BATCHES, self.datasets.valid.per_epoch)
        for index in range(total):
            self.progress.on_prepare("validating", index, total)
            yield self.datasets.valid[index]

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
        started = time.perf_counter()
        self.folder.sync()
        self.trainer.save(self.folder.checkpoints, self.step, self.values())
        self.folder.record_checkpoint(self.step)
        self.saved = self.step
        self.prune()
        self.paused += time.perf_counter() - started
        return True

    def prune(self) -> None:
        """Delete the checkpoints that `save.keep` does not keep."""
        if self.processes.is_first:
            prune(self.folder.checkpoints, self.recipe.save.keep, self.best_step, self.folder.notify)

    def values(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {name: getattr(self, name) for name in SAVED} | {
            "ema_updates": 0 if self.trainer.ema is None else self.trainer.ema.updates,
            "seconds": self.before + time.perf_counter() - self.began,
            "fixed": self.fixed_values(),
            "special": self.trainer.model.special.to_dict(),
            "generation": self.trainer.model.generation_settings,
            "adapter": self.adapter_values(),
        }

    def adapter_values(self) -> dict[str, Any] | None:
        """What the adapter that is trained consists of, and the hash of its base; None where the whole model is."""
        model = self.trainer.model
        return describe_adapter(model.adapters[DEFAULT], model.config) if model.adapters else None

    def fixed_values(self) -> dict[str, Any]:
        """What has to be the same in a run that is resumed."""
        own = {"model": self.trainer.model.config.to_dict(), "tokens": self.datasets.fingerprint}
        return fixed_fields(self.recipe) | own | self.trainer.objective.fixed_fields()

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint, or refuse one of another model or other data."""
        check_same(comparable(state.values["fixed"]), comparable(self.fixed_values()), self.folder.path)
        if state.step > self.steps:
            raise ValueError(
                f"{self.folder.path} has {state.step} steps behind it, more than the {self.steps} that are asked for"
            )
        if self.processes.is_first:
            check_steps_left(self.folder, state.step, self.steps)
        self.trainer.restore(state)
        for name in SAVED:
            setattr(self, name, state.values[name])
        self.saved, self.before = self.step, state.values["seconds"]
        if self.processes.is_first:
            rename_damaged_checkpoints(self.folder.checkpoints, self.step)
        self.prune()  # a kill may have come between the last checkpoint and this
        self.folder.notify(f"resuming from {state.folder.name} of {self.steps} steps")

    def finish(self, status: Status, seconds: float, overhead: float) -> TrainingResult:
        """Write the model, a sample and the plot of the losses, and report how the run ended."""
        sample = model_step = None
        if status == "finished":
            if self.step < self.steps:
                self.folder.notify(
                    f"{self.evaluations_since_best} evaluations in a row found no lower validation loss than that of "
                    f"step {self.best_step} (train.patience): the run ends here"
                )
            model_step = self.use_best() if self.recipe.save.best else self.step
            with self.trainer.eval_mode():
                model = self.trainer.inference_model()
                sample = self.trainer.objective.sample(model, self.datasets)
                self.folder.finish(model, sample, self.trainer.model_sources())
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
            model_step=model_step,
        )

    def use_best(self) -> int:
        """Take the weights of the checkpoint with the lowest validation loss, and say whose weights these are."""
        if self.best_step in (None, self.step):
            return self.step
        place = self.folder.checkpoints / checkpoint_name(self.best_step)
        why_not = self.processes.from_first(unusable_reason(self.best_step, place) if self.processes.is_first else None)
        if why_not is not None:
            self.folder.notify(
                f"the model is that of step {self.step} and not of the best one, {self.best_step}: {why_not}"
            )
            return self.step
        self.trainer.restore(read_checkpoint(self.best_step, place))
        self.folder.notify(f"the model is that of step {self.best_step}, which has the lowest validation loss")
        return self.best_step
