"""Translation on parallel text, beside the Marian architecture of transformers with a plain loop, in the same run.

A test set is split off by source sentence. Each recipe of ours is trained as `phasor train` trains it; Marian takes
the first recipe's tokens, batches, schedule and epochs. Everybody decodes with five beams, and sacrebleu scores.

    python benchmarks/translation.py pairs.tsv.gz --name en-es [--skip-marian] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from phasor.config.overrides import apply_overrides
from phasor.config.recipe import Recipe, read_recipe
from phasor.data.prefetch import StepBatches
from phasor.data.store import prepare
from phasor.evaluation import evaluate
from phasor.evaluation.scores import scores
from phasor.recipes import find
from phasor.training import StepReport, TrainingProgress, train
from phasor.training.datasets import Datasets, build_datasets

RECIPES = ("translation", "translation-modern")


def split(path: Path, folder: Path, count: int) -> tuple[Path, Path, list[list[str]]]:
    """Files to train on and to test with: the test has `count` source sentences that training never sees."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file]

    def place(source: str) -> bytes:
        return hashlib.sha256(source.strip().casefold().encode()).digest()

    held = set(sorted({place(source) for source, _ in pairs})[:count])
    test: dict[bytes, list[str]] = {}
    for pair in pairs:
        if place(pair[0]) in held:
            test.setdefault(place(pair[0]), pair)
    rest = [pair for pair in pairs if place(pair[0]) not in held]
    train_file, test_file = folder / "train.tsv", folder / "test.tsv"
    for file, chosen in ((train_file, rest), (test_file, list(test.values()))):
        file.write_text("".join("\t".join(pair) + "\n" for pair in chosen), encoding="utf-8")
    return train_file, test_file, list(test.values())


class Curve(TrainingProgress):
    """Keeps the validation losses, and says a line now and then."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.speeds: list[float] = []

    def on_step(self, report: StepReport) -> None:
        if report.step % 1000 == 0:
            self.speeds.append(report.tokens_per_second)
            print(f"  step {report.step} of {report.steps}, loss {report.loss:.3f}", flush=True)

    def on_evaluation(self, step: int, loss: float) -> None:
        self.points.append((step, loss))


def ours(recipe: Recipe, test_file: Path) -> dict[str, Any]:
    curve = Curve()
    begun = time.perf_counter()
    result = train(recipe, progress=curve)
    trained = time.perf_counter() - begun
    begun = time.perf_counter()
    found = evaluate(result.folder, test_file, num_beams=5)
    return {
        **{name: found[name] for name in ("bleu", "chrf", "perplexity", "bleu_signature", "chrf_signature")},
        "train_s": round(result.seconds, 1),
        "train_and_prepare_s": round(trained, 1),
        "evaluate_s": round(time.perf_counter() - begun, 1),
        "steps": result.steps,
        "overhead": round(result.overhead, 4),
        "curve": curve.points,
    }


def marian(recipe: Recipe, found: Datasets, test: list[list[str]]) -> dict[str, Any]:
    """The architecture of transformers, trained with a loop as people write it."""
    from transformers import MarianConfig, MarianMTModel

    special, device = found.special, "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.train.seed)
    size = {"attention_heads": 8, "ffn_dim": 1024, "layers": 4}
    config = MarianConfig(
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in size.items()},
        vocab_size=found.tokenizer.get_vocab_size(),
        d_model=256,
        scale_embedding=True,
        dropout=0.1,
        max_position_embeddings=256,
        pad_token_id=special.pad,
        eos_token_id=special.eos,
        bos_token_id=special.bos,
        decoder_start_token_id=special.start,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).to(device).train()
    betas = (recipe.optimizer.beta1, recipe.optimizer.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.optimizer.lr, betas, weight_decay=0.0, fused=True)
    feed = StepBatches(found.train, accumulation_steps=1, workers=0, device=device)
    steps = recipe.train.num_steps(found.train.per_epoch)

    def loss_of(batch: Any, smoothing: float) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            mask = batch.source_attention_mask.long()
            out = model(input_ids=batch.source, attention_mask=mask, decoder_input_ids=batch.tokens)
            targets = batch.targets.masked_fill(batch.weights == 0, -100)
            logits = out.logits.float().flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)

    curve, validating, tokens = [], 0.0, 0.0
    begun = time.perf_counter()
    for step in range(steps):
        (batch,), count = feed.take(step)
        optimizer.param_groups[0]["lr"] = recipe.schedule.lr_at(step, steps, recipe.optimizer.lr)
        loss = loss_of(batch, recipe.train.label_smoothing)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += count
        if (step + 1) % recipe.train.evaluate_every == 0 or step + 1 == steps:
            started = time.perf_counter()
            model.eval()
            with torch.no_grad():
                here = [found.valid[i].to(device) for i in range(min(64, found.valid.per_epoch))]
                total = sum(float(loss_of(batch, 0.0)) * batch.count for batch in here)
            curve.append((step + 1, total / sum(batch.count for batch in here)))
            model.train()
            validating += time.perf_counter() - started
            print(f"  step {step + 1} of {steps}, validation {curve[-1][1]:.3f}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun - validating
    begun = time.perf_counter()
    translations = marian_translations(model.eval(), found, [source for source, _ in test], device)
    decoding = time.perf_counter() - begun
    return {
        **scores(translations, [target for _, target in test]),
        "train_s": round(seconds, 1),
        "evaluate_s": round(decoding, 1),
        "steps": steps,
        "target_tokens_per_s": round(tokens / seconds),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "curve": curve,
    }


def marian_translations(model: Any, found: Datasets, sources: list[str], device: str) -> list[str]:
    ids = [found.tokenizer.encode(source).ids for source in sources]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out = [""] * len(ids)
    for start in range(0, len(order), 250):
        chosen = order[start : start + 250]
        width = max(len(ids[i]) for i in chosen)
        rows = torch.tensor([ids[i] + [found.special.pad] * (width - len(ids[i])) for i in chosen], device=device)
        mask = torch.tensor([[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in chosen], device=device)
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            new = model.generate(rows, attention_mask=mask, num_beams=5, max_new_tokens=2 * width + 32)
        for i, text in zip(chosen, found.tokenizer.decode_batch(new.tolist()), strict=True):
            out[i] = text
    return out


def draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="share of training", ylabel="validation loss, nats per token")
    for (name, found), color in zip(results.items(), ("#0072b2", "#e69f00", "#666666"), strict=False):
        points = [(step / found["steps"], loss) for step, loss in found["curve"]]
        label = f"{name}: BLEU {found['bleu']:.1f}, {found['train_s']:.0f} s"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=label)
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("data", type=Path)
    options.add_argument("--name", required=True, help="for the files of results")
    options.add_argument("--test", type=int, default=1500)
    options.add_argument("--recipes", nargs="*", default=RECIPES)
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options.add_argument("--skip-marian", action="store_true")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_file, test_file, test = split(given.data, folder, given.test)
        changes = dict(pair.split("=", 1) for pair in given.set)
        changes |= {"data.train": str(train_file), "data.cache": str(folder / "cache")}
        recipes = {}
        for path in given.recipes:
            fields = apply_overrides(read_recipe(find(path)), changes | {"out": str(folder / Path(path).stem)})
            recipes[Path(path).stem] = Recipe.from_dict(fields)
        for system, recipe in recipes.items():
            print(system, flush=True)
            results[system] = ours(recipe, test_file)
            print({key: value for key, value in results[system].items() if key != "curve"}, flush=True)
        if not given.skip_marian:
            first = next(iter(recipes.values()))
            print("marian", flush=True)
            results["Marian of transformers"] = marian(
                first, build_datasets(first, prepare(first, Path(str(first.out), "data"))), test
            )
            print({key: value for key, value in results["Marian of transformers"].items() if key != "curve"})
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"device": device, "torch": torch.__version__, "test_sentences": len(test), "systems": results}
    (given.out / f"translation-{given.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(results, given.out / f"translation-{given.name}.png")
    for system, found in results.items():
        print(
            f"{system:28} BLEU {found['bleu']:5.1f}  chrF {found['chrf']:5.1f}  training {found['train_s']:6.1f} s  "
            f"decoding {found['evaluate_s']:5.1f} s"
        )


if __name__ == "__main__":
    main()
