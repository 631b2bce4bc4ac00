"""Tokens per second of training on a CPU: phasor's loop, a page of plain torch, and transformers' Trainer.

All three train the same GPT from the same weights on the same batches, and their losses must agree before anything is
timed. `phasor train` runs whole, with its run folder, metrics and events. The limit beside them is what matrix
products alone would take: the products of the blocks and the head, forward and backward, timed on this machine.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from phasor.bench import plain_gpt
from phasor.bench.peers import is_installed, transformers_model
from phasor.bench.study import Study
from phasor.bench.timing import call_seconds
from phasor.config.recipe import DataConfig, Recipe
from phasor.config.schema import Config
from phasor.data.batch import Batch
from phasor.data.sources import documents
from phasor.data.store import prepare
from phasor.training.build import build_model
from phasor.training.datasets import build_datasets
from phasor.training.loop import train
from phasor.training.progress import StepReport, TrainingProgress
from phasor.transformer import Transformer

LR = 1e-3


class TrainCPUSettings(Config):
    """Sizes of the GPT, `rows` of `length` tokens in a batch, and runs of `steps`; speed counts after `warm` of them.

    The texts are the sources of Python's standard library, or the first `files` of them.
    """

    vocab_size: int = 1024
    length: int = 128
    dim: int = 128
    num_heads: int = 4
    num_layers: int = 4
    rows: int = 8
    steps: int = 150
    warm: int = 5
    runs: int = 3
    files: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.length


CPU = TrainCPUSettings()
TINY = TrainCPUSettings(
    vocab_size=300, length=12, dim=16, num_heads=2, num_layers=1, rows=2, steps=4, warm=1, runs=1, files=24
)


class StepClock(TrainingProgress):
    """The loss of every step, and when it ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []
        self.outside = 0.0  # the share of the time of `phasor train` that neither its model nor its optimizer took

    def on_step(self, report: StepReport) -> None:
        self.record(report.loss)

    def record(self, loss: float) -> None:
        self.losses.append(loss)
        self.times.append(time.perf_counter())

    def steps_per_second(self, warm: int) -> float:
        """From the end of the warm-up to the last step."""
        return (len(self.times) - warm) / (self.times[-1] - self.times[warm - 1])


class Given(NamedTuple):
    """What every system trains: the recipe of `phasor train`, and its batches and its untrained model."""

    recipe: Recipe
    batches: list[Batch]
    model: Transformer


def run(study: Study) -> None:
    settings: TrainCPUSettings = study.settings
    systems = dict(SYSTEMS)
    if not (is_installed("transformers") and is_installed("accelerate")):
        study.say(f"{TRAINER} is left out: it needs the packages transformers and accelerate")
        del systems[TRAINER]
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    outside = study.result["outside"] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = training_recipe(Path(folder), settings)
        datasets = build_datasets(recipe, prepare(recipe, Path(folder) / "data"))
        batches = [datasets.train[i] for i in range(settings.steps)]
        for _ in range(settings.runs):
            given, clocks = (
                Given(recipe, batches, build_model(recipe, datasets)),
                {name: StepClock() for name in systems},
            )
            for name, train_by in systems.items():
                train_by(given, clocks[name])
            check_losses(study, clocks)
            outside.append(clocks["phasor"].outside)
            for name, clock in clocks.items():
                speeds[name].append(settings.tokens * clock.steps_per_second(settings.warm))
            study.result["tokens_per_second"] = {name: statistics.median(found) for name, found in speeds.items()}
            study.save()
    limit = study.result["products_alone"] = products_limit(settings)
    medians = study.result["tokens_per_second"]
    for name, speed in medians.items():
        ratio = medians["phasor"] / speed
        study.say(
            f"{name}: {speed:.0f} tokens/s, {speed / limit:.0%} of the limit; phasor is {ratio:.2f} times as fast"
        )
    study.say(f"matrix products alone: {limit:.0f} tokens/s; outside of model and optimizer: {max(outside):.2%}")


def training_recipe(folder: Path, settings: TrainCPUSettings) -> Recipe:
    """The standard library's sources as one document, which a page of plain torch can train on too."""
    texts = list(islice(documents(None, DataConfig(format="python")), settings.files))
    (folder / "train.txt").write_text("".join(texts[:-20]), encoding="utf-8")
    (folder / "valid.txt").write_text("".join(texts[-20:]), encoding="utf-8")
    return Recipe.from_dict(
        {
            "model": {
                "preset": "gpt-2",
                "dim": settings.dim,
                "num_heads": settings.num_heads,
                "num_layers": settings.num_layers,
                "max_length": settings.length,
                "hidden_dim": 4 * settings.dim,
                "dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.0},
            },
            "data": {
                "train": str(folder / "train.txt"),
                "valid": str(folder / "valid.txt"),
                "tokenizer": "bpe",
                "vocab_size": settings.vocab_size,
                "sequence_length": settings.length,
                "cache": str(folder / "cache"),
            },
            "train": {
                "steps": settings.steps,
                "batch_tokens": settings.tokens,
                "evaluate_every": 10**6,
                "device": "cpu",
            },
            "optimizer": {"lr": LR},
            "schedule": {"kind": "cosine", "warmup": 0, "floor": 0.0},
            "save": {"every": 10**6},
        }
    )


def train_phasor(given: Given, clock: StepClock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock.outside = train(given.recipe.replace(out=f"{folder}/run"), progress=clock).overhead


def train_plain(given: Given, clock: StepClock) -> None:
    pairs = ((batch.tokens, marked_targets(batch)) for batch in given.batches)
    plain_gpt.train(plain(given.model), pairs, len(given.batches), LR, clock.record)


def train_trainer(given: Given, clock: StepClock) -> None:
    transformers = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=len(given.batches[0].tokens),
            max_steps=len(given.batches),
            learning_rate=LR,
            weight_decay=0.1,
            adam_beta2=0.95,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        model, rows = transformers_model(given.model), BatchRows(given.batches)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        step = trainer.training_step

        def timed_step(*inputs: Any, **fields: Any) -> Any:
            loss = step(*inputs, **fields)
            clock.record(float(loss))
            return loss

        trainer.training_step = timed_step
        trainer._get_train_sampler = lambda *_: SequentialSampler(rows)
        trainer.train()


TRAINER = "transformers' Trainer"
SYSTEMS: dict[str, Callable[[Given, StepClock], None]] = {
    "phasor": train_phasor,
    "plain torch": train_plain,
    TRAINER: train_trainer,
}


def plain(model: Transformer) -> plain_gpt.GPT:
    """The plain model with the weights of ours."""
    config, state = model.config, model.state_dict()
    heads, layers = config.num_heads, config.num_layers
    built = plain_gpt.GPT(config.vocab_size, config.max_length, config.dim, heads, layers)
    renamed = {"tokens.weight": state["tokens.weight"], "positions.weight": state["decoder.positions.0.weight"]}
    names = {"norm1": "residual.norms.0", "norm2": "residual.norms.1", "qkv": "attention.qkv", "out": "attention.out"}
    names |= {"up": "feedforward.up", "down": "feedforward.down"}
    for i in range(layers):
        for theirs, mine in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"decoder.blocks.{i}.{mine}.{kind}"]
                if theirs == "qkv":  # ours are together head by head
                    tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                renamed[f"blocks.{i}.{theirs}.{kind}"] = tensor
    renamed |= {f"norm.{kind}": state[f"decoder.norm.{kind}"] for kind in ("weight", "bias")}
    built.load_state_dict(renamed)
    return built


def marked_targets(batch: Batch) -> Tensor:
    """The targets, with torch's mark where a row is padding."""
    return batch.targets.masked_fill(batch.weights == 0, -100)


class BatchRows(Dataset[dict[str, Tensor]]):
    """The rows of our batches, in their order."""

    def __init__(self, batches: list[Batch]) -> None:
        self.tokens = torch.cat([batch.tokens for batch in batches])
        self.targets = torch.cat([marked_targets(batch) for batch in batches])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The labels are there for form; the loss takes those that are shifted already.
        tokens, targets = self.tokens[index], self.targets[index]
        return {"input_ids": tokens, "labels": targets, "shift_labels": targets}


def check_losses(study: Study, clocks: dict[str, StepClock]) -> None:
    """All have the same losses: of the first step to rounding, in the middle and in the end nearly."""
    ours = clocks["phasor"].losses
    for name, clock in clocks.items():
        for step, tolerance in ((0, 1e-5), (len(ours) // 2, 2e-2), (len(ours) - 1, 2e-2)):
            study.check(f"the loss of {name} in step {step}", abs(clock.losses[step] - ours[step]), tolerance)


def products_limit(settings: TrainCPUSettings) -> float:
    """Tokens per second if there were nothing but matrix products."""
    dim, tokens = settings.dim, settings.tokens
    shapes = [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)] * settings.num_layers
    shapes.append((dim, settings.vocab_size))
    seconds = 0.0
    for a, b in set(shapes):
        x, w, y = torch.randn(tokens, a), torch.randn(a, b), torch.randn(tokens, b)
        products = partial(multiply, x, w, y)
        seconds += shapes.count((a, b)) * min(call_seconds(products) for _ in range(7))
    return tokens / seconds


def multiply(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A product, and those of its two gradients."""
    return x @ w, y @ w.T, x.T @ y
