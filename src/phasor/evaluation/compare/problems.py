"""One scheme of a comparison on a task: train a decoder on small problems, then count exact answers to larger ones."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints import save
from phasor.checkpoints.folder import model_folder
from phasor.config.generation import SpecialTokens
from phasor.config.recipe import DataConfig, OptimizerConfig, Recipe, TrainConfig
from phasor.config.schedules import CosineSchedule
from phasor.data.batch import Batch
from phasor.data.tasks import COUPLED, TaskProblems
from phasor.data.tokenizers import SpecialIds, byte_tokenizer, find_tokenizer, load_tokenizer
from phasor.device import resolve_device
from phasor.evaluation.compare.schemes import ComparedScheme, model_fields
from phasor.evaluation.compare.settings import CompareSettings
from phasor.generation.translation import Progress
from phasor.nn.mode import eval_mode
from phasor.training.build import model_config
from phasor.training.loop import fork_generators
from phasor.training.progress import StepReport, TrainingProgress
from phasor.training.trainer import Trainer
from phasor.transformer import Transformer

CHECKED_BATCHES = 4  # that tell whether problems are still made as they were
BATCH_TOKENS = 16384
COUPLED_MARGIN = 3  # positions of special tokens, of signs, and of the digit that a sum has more


def problems_of(settings: CompareSettings, scheme: ComparedScheme | None, seed: int) -> TaskProblems:
    """The problems of a task, with the positions of a scheme."""
    assert settings.task is not None
    if settings.tokenizer == "bytes":
        tokenizer, special = byte_tokenizer(), SpecialIds()
    else:
        tokenizer, special = load_tokenizer(find_tokenizer(settings.tokenizer))
    positions = None if scheme is None else scheme.positions
    plain = TaskProblems(settings.task, tokenizer, special, seed)
    to = count_positions(settings, positions, plain)
    return TaskProblems(settings.task, tokenizer, special, seed, positions, None if positions is None else to)


def count_positions(settings: CompareSettings, positions: str | None, problems: TaskProblems) -> int:
    """How many positions the largest problems need: one per token, or of coupled ones one per digit of a sum."""
    largest = settings.lengths[-1]
    return largest + COUPLED_MARGIN if positions == COUPLED else problems.tokens_of(largest)


def task_fingerprint(settings: CompareSettings) -> str:
    """A hash of the first problems that are trained on and of those that are tested."""
    problems = problems_of(settings, None, 0)
    batches = [problems.train_batch(step, settings.sizes.task_rows, settings.length) for step in range(CHECKED_BATCHES)]
    batches += [problems.test_batch(size, settings.rows) for size in settings.lengths]
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.tokens.numpy().tobytes())
    return found.hexdigest()


def task_recipe(settings: CompareSettings, scheme: ComparedScheme, seed: int, largest: int) -> Recipe:
    """The recipe of one run; `largest` is how many positions are tested."""
    sizes, trained = settings.sizes, largest * settings.length // settings.lengths[-1]
    return Recipe(
        model=model_fields(sizes.task_model, scheme, largest, trained, largest),
        data=DataConfig(sequence_length=settings.length),
        train=TrainConfig(steps=settings.steps, seed=seed, device=settings.device),
        optimizer=OptimizerConfig(lr=sizes.task_lr),
        schedule=CosineSchedule(warmup=max(1, settings.steps // 20)),
    )


def check_task(settings: CompareSettings) -> None:
    """Refuse a scheme that the task's model cannot have, before anything is trained."""
    for scheme in settings.schemes:
        try:
            model_config(task_recipe(settings, scheme, 0, settings.lengths[-1]), vocab_size=1)
        except ValueError as error:
            raise ValueError(f"the scheme {scheme.name!r} cannot be compared: {error}") from None


def train_task(
    settings: CompareSettings, scheme: ComparedScheme, seed: int, folder: Path, progress: TrainingProgress
) -> Transformer:
    """Train one model on problems up to the trained size, and save it in a folder."""
    model_folder(folder)  # is refused if it holds more than a model
    problems = problems_of(settings, scheme, seed)
    largest = count_positions(settings, scheme.positions, problems)
    recipe = task_recipe(settings, scheme, seed, largest)
    device = resolve_device(settings.device)
    with fork_generators(device):
        torch.manual_seed(seed)
        vocab_size = problems.tokenizer.get_vocab_size()
        config = model_config(recipe, vocab_size).replace(trained_length=problems.tokens_of(settings.length))
        trainer = Trainer(Transformer(config), recipe, settings.steps)
        began = time.perf_counter()
        for step in range(settings.steps):
            batch = problems.train_batch(step, settings.sizes.task_rows, settings.length)
            handle = trainer.train_step(step, [batch.to(device)], batch.count)
            if step % 10 == 9 or step + 1 == settings.steps:
                result = handle.result()
                each = (time.perf_counter() - began) / (step + 1)
                left = each * (settings.steps - step - 1)
                report = StepReport(step + 1, settings.steps, result.loss, result.lr, batch.tokens.numel() / each, left)
                progress.on_step(report)
    special = problems.special
    model = trainer.model
    model.tokenizer = problems.tokenizer
    model.special = SpecialTokens(stop=(special.eos,), bos=special.bos, pad=special.pad)
    save(model, folder)
    return model


def measure_task(
    settings: CompareSettings, scheme: ComparedScheme, model: Transformer, progress: Progress | None
) -> dict[str, Any]:
    """Which problems of each size a model answers exactly; the problems are the same for all schemes and seeds."""
    problems = problems_of(settings, scheme, 0)
    exact: dict[str, list[int]] = {}
    for number, size in enumerate(settings.lengths):
        whole = problems.test_batch(size, settings.rows)
        rows = max(1, BATCH_TOKENS // whole.tokens.shape[1])
        parts = [answer_batch(model, some_rows(whole, at, at + rows)) for at in range(0, settings.rows, rows)]
        exact[str(size)] = [int(right) for part in parts for right in part]
        if progress is not None:
            progress(number + 1, len(settings.lengths))
    return {"exact": exact, "parameters": sum(weight.numel() for weight in model.parameters())}


def some_rows(batch: Batch, start: int, stop: int) -> Batch:
    return batch.map(lambda value: value[start:stop])


@torch.inference_mode()
def answer_batch(model: Transformer, batch: Batch) -> list[bool]:
    """Whether each row's answer is exact."""
    here = batch.to(model.tokens.weight.device)
    with eval_mode(model):
        logits: Tensor = model(*here.inputs, **here.sequence_args)
    return exact_matches(logits.argmax(-1), here)


def exact_matches(likeliest: Tensor, batch: Batch) -> list[bool]:
    """Whether the likeliest tokens of each row are its answer: then greedy decoding writes exactly that.

    >>> targets, weights = torch.tensor([[5, 6, 7]] * 2), torch.tensor([[0.0, 1.0, 1.0]] * 2)
    >>> batch = Batch(tokens=torch.ones(2, 3).long(), targets=targets, weights=weights)
    >>> exact_matches(torch.tensor([[0, 6, 7], [5, 6, 0]]), batch)
    [True, False]
    """
    right = (likeliest == batch.targets) | (batch.weights == 0)
    return [bool(value) for value in right.all(1).tolist()]
