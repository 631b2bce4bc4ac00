"""Tokens a second of training on the CPU: phasor's loop, a page of plain torch, and transformers' Trainer.

All three train the same GPT from the same weights on the same batches; their losses must agree before anything is
timed. `phasor train` runs whole, with its run folder, metrics and events. The limit beside them is what matrix
products alone would take: the products of the blocks and the head, forward and backward, timed on this machine.

    python benchmarks/training.py [--steps 150] [--runs 3] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import plain_gpt
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from phasor.bench.peers import transformers_model
from phasor.config.recipe import DataConfig, Recipe
from phasor.data.batch import Batch
from phasor.data.sources import documents
from phasor.data.store import prepare
from phasor.training import StepReport, TrainingProgress, train
from phasor.training.build import build_model
from phasor.training.datasets import build_datasets
from phasor.transformer import Transformer

VOCAB, LENGTH, DIM, HEADS, LAYERS, ROWS = 1024, 128, 128, 4, 4, 8  # the size of the default run
WARM, LR = 5, 1e-3


class Clock(TrainingProgress):
    """Losses, and the seconds from the end of the warm-up to the last step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.after(report.step - 1, report.loss)

    def after(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.times.append(time.perf_counter())

    def speed(self) -> float:
        return (len(self.times) - WARM) * ROWS * LENGTH / (self.times[-1] - self.times[WARM - 1])


def recipe(folder: Path, steps: int) -> Recipe:
    """The standard library's sources as one document, which a page of plain torch can train on too."""
    texts = list(documents(None, DataConfig(format="python")))
    (folder / "train.txt").write_text("".join(texts[:-20]), encoding="utf-8")
    (folder / "valid.txt").write_text("".join(texts[-20:]), encoding="utf-8")
    return Recipe.from_dict(
        {
            "model": {
                "preset": "gpt-2",
                "dim": DIM,
                "num_heads": HEADS,
                "num_layers": LAYERS,
                "max_length": LENGTH,
                "hidden_dim": 4 * DIM,
                "dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.0},
            },
            "data": {
                "train": str(folder / "train.txt"),
                "valid": str(folder / "valid.txt"),
                "tokenizer": "bpe",
                "vocab_size": VOCAB,
                "sequence_length": LENGTH,
                "cache": str(folder / "cache"),
            },
            "train": {"steps": steps, "batch_tokens": ROWS * LENGTH, "evaluate_every": 10**6, "device": "cpu"},
            "optimizer": {"lr": LR},
            "schedule": {"kind": "cosine", "warmup": 0, "floor": 0.0},
            "save": {"every": 10**6},
        }
    )


def plain(model: Transformer) -> plain_gpt.GPT:
    """The plain model with the weights of ours."""
    built, state = plain_gpt.GPT(VOCAB, LENGTH, DIM, HEADS, LAYERS), model.state_dict()
    renamed = {"tokens.weight": state["tokens.weight"], "positions.weight": state["decoder.positions.0.weight"]}
    names = {"norm1": "residual.norms.0", "norm2": "residual.norms.1", "qkv": "attention.qkv", "out": "attention.out"}
    names |= {"up": "feedforward.up", "down": "feedforward.down"}
    for i in range(LAYERS):
        for theirs, mine in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"decoder.blocks.{i}.{mine}.{kind}"]
                if theirs == "qkv":  # ours are together head by head
                    tensor = tensor.unflatten(0, (HEADS, 3, DIM // HEADS)).transpose(0, 1).flatten(0, 2)
                renamed[f"blocks.{i}.{theirs}.{kind}"] = tensor
    renamed |= {f"norm.{kind}": state[f"decoder.norm.{kind}"] for kind in ("weight", "bias")}
    built.load_state_dict(renamed)
    return built


def target_weights(batch: Batch) -> torch.Tensor:
    """The targets, with torch's mark where a row is padding."""
    return batch.targets.masked_fill(batch.weights == 0, -100)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of our batches, in their order."""

    def __init__(self, batches: list[Batch]) -> None:
        self.tokens = torch.cat([batch.tokens for batch in batches])
        self.targets = torch.cat([target_weights(batch) for batch in batches])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # The labels are there for form; the loss takes those that are shifted already.
        tokens, targets = self.tokens[index], self.targets[index]
        return {"input_ids": tokens, "labels": targets, "shift_labels": targets}


def run_phasor(recipe_: Recipe, clock: Clock) -> float:
    """Returns the share of its time that neither the model nor the optimizer took."""
    with tempfile.TemporaryDirectory() as folder:
        return train(recipe_.replace(out=f"{folder}/run"), progress=clock).overhead


def run_plain(model: plain_gpt.GPT, batches: list[Batch], clock: Clock) -> None:
    pairs = ((batch.tokens, target_weights(batch)) for batch in batches)
    plain_gpt.train(model, pairs, len(batches), LR, clock.after)


def run_trainer(model: GPT2LMHeadModel, batches: list[Batch], clock: Clock) -> None:
    class Timed(Trainer):
        def training_step(self, *arguments: Any, **more: Any) -> Any:
            loss = super().training_step(*arguments, **more)
            clock.after(len(clock.losses), float(loss))
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, max_steps=len(batches), learning_rate=LR, weight_decay=0.1,
            adam_beta2=0.95, lr_scheduler_type="cosine", optim="adamw_torch_fused", save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=10, remove_unused_columns=False,
        )  # fmt: skip
        Timed(model=model, args=arguments, train_dataset=Rows(batches)).train()


def products_limit() -> float:
    """Tokens a second if there were nothing but matrix products."""
    tokens = ROWS * LENGTH
    shapes = [(DIM, 3 * DIM), (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)] * LAYERS + [(DIM, VOCAB)]
    pairs = [(torch.randn(tokens, a), torch.randn(a, b), torch.randn(tokens, b)) for a, b in set(shapes)]
    counts = [shapes.count(tuple(w.shape)) for _, w, _ in pairs]
    best = []
    for (x, w, y), count in zip(pairs, counts, strict=True):
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            x @ w, y @ w.T, x.T @ y
            times.append(time.perf_counter() - begun)
        best.append(min(times) * count)
    return tokens / sum(best)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    speeds: dict[str, list[float]] = {"phasor": [], "plain torch": [], "transformers' Trainer": []}
    overhead = []
    with tempfile.TemporaryDirectory() as name:
        recipe_ = recipe(Path(name), given.steps)
        found = build_datasets(recipe_, prepare(recipe_, Path(name) / "data"))
        batches = [found.train[i] for i in range(given.steps)]
        for number in range(given.runs):
            model = build_model(recipe_, found)
            clocks = {name: Clock() for name in speeds}
            gpt = plain(model)
            theirs = transformers_model(model)
            overhead.append(run_phasor(recipe_, clocks["phasor"]))
            run_plain(gpt, batches, clocks["plain torch"])
            run_trainer(theirs, batches, clocks["transformers' Trainer"])
            if number == 0:
                check(clocks)
            for name, clock in clocks.items():
                speeds[name].append(clock.speed())
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    limit = products_limit()
    for name, speed in medians.items():
        ratio = medians["phasor"] / speed
        print(f"{name:24} {speed:8.0f} tokens/s   phasor: {ratio:.2f} times as fast   {speed / limit:.0%} of the limit")
    print(f"matrix products alone    {limit:8.0f} tokens/s; outside of model and optimizer: {max(overhead):.2%}")
    report = {"tokens_per_second": medians, "products_alone": limit, "overhead": overhead, "torch": torch.__version__}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def check(clocks: dict[str, Clock]) -> None:
    """All must have had the same losses: at first to rounding, in the end nearly."""
    ours = clocks["phasor"].losses
    for name, clock in clocks.items():
        for step, within in ((0, 1e-5), (len(ours) // 2, 2e-2), (len(ours) - 1, 2e-2)):
            if abs(clock.losses[step] - ours[step]) > within:
                raise SystemExit(f"{name}: the loss of step {step} is {clock.losses[step]}, and ours {ours[step]}")


if __name__ == "__main__":
    main()
