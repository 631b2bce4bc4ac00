"""Which extension reads further: models trained at one length, read at 4 times it untuned, and at 8 times it tuned.

    python benchmarks/extensions.py --work WORK [--wikitext FOLDER] [--out benchmarks/results/extensions.json]
    python benchmarks/extensions.py --work WORK --small
    python benchmarks/extensions.py --work WORK --seed 2     # one seed alone, beside others

Trains three models of 20 million parameters (three seeds) at length 512, on WikiText-2 (the files
wikitext-2-train.txt.gz and wikitext-2-valid.txt.gz in FOLDER, if it is given) and the sources of Python's standard
library. Held out are the articles of the validation file and a tenth of the sources. Then:

- untuned at 2,048: plain, linear (PI), NTK, YaRN, and the model with a window of 512, without and with sinks;
- at 4,096 after 400 steps with rows of 4,096: plain, linear, NTK and YaRN; the window's model has 400 steps too, with
  rows of 512.

All by the protocol `last`, paired over held-out documents. An order is stated where every seed shows it. Runs and the
numbers of each seed are kept in WORK, and a run that was stopped resumes. `--small` is a form of a few minutes for the
CPU, with its own sizes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import phasor
from phasor.checkpoints.runs import is_run
from phasor.config.recipe import DataConfig, OptimizerConfig, Recipe, SaveConfig, TrainConfig
from phasor.config.schedules import CosineSchedule
from phasor.data.sources import standard_library
from phasor.evaluation import evaluate_lengths
from phasor.evaluation.intervals import compare_pairs
from phasor.evaluation.report import provenance
from phasor.files import atomic_write
from phasor.models.extensions import extend_config
from phasor.training import extend, train
from phasor.training.extend import fine_tuning, with_texts

SEEDS = (1, 2, 3)
UNTUNED = ["none", "linear", "ntk", "yarn", "sinks"]
TUNED = ["linear", "ntk", "yarn"]
PUBLISHED = [
    "YaRN (Peng et al. 2023, arXiv:2309.00071), Llama 7B tuned at 16 times its length: "
    "at short lengths PI is worst, at the full length NTK is worst and YaRN best. Here: small models, the protocol "
    "`last`, other text, and a window beside them, which that table does not have.",
    "StreamingLLM (Xiao et al. 2023, arXiv:2309.17453), models of 7 billion parameters and more: a window without "
    "sinks collapses as soon as the first tokens leave it, and 4 sinks prevent that. Here: small models, trained on "
    "rows that mostly begin inside of a document, so that they have less reason to rely on their first tokens.",
]


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    length: int
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    batch_tokens: int
    steps: int
    tune_steps: int
    lr: float
    tune_lr: float
    rows: int
    files: int | None


LARGE = Sizes(
    512, {"dim": 384, "num_heads": 6, "num_layers": 8}, {"tokenizer": "bpe", "vocab_size": 8192},
    65536, 1500, 400, 1e-3, 2e-4, 400, None,
)  # fmt: skip
SMALL = Sizes(
    64, {"dim": 48, "num_heads": 2, "num_layers": 2}, {"tokenizer": "bytes"},
    2048, 200, 20, 4e-3, 1e-3, 30, 60,
)  # fmt: skip


def articles(file: Path) -> Iterator[str]:
    """The articles of a file of WikiText: each begins with a heading of one equals sign."""
    text = gzip.decompress(file.read_bytes()).decode("utf-8")
    yield from (part for part in re.split(r"(?m)^(?= = [^=].* = $)", text) if part.strip())


def is_held_out(name: str) -> bool:
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] < 26


def write_texts(work: Path, wikitext: Path | None, files: int | None) -> tuple[Path, Path]:
    """The documents to train on and those that are held out, as JSON lines."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for path in standard_library()[:files]:
        texts[is_held_out(path.name)].append(path.read_text(encoding="utf-8", errors="replace"))
    for held_out, name in ((False, "train"), (True, "valid")):
        if wikitext is not None:
            texts[held_out] += articles(wikitext / f"wikitext-2-{name}.txt.gz")
    for held_out, name in ((False, "train"), (True, "valid")):
        mixed = sorted(texts[held_out], key=lambda text: hashlib.blake2b(text.encode()).digest())
        lines = (json.dumps({"text": text}) + "\n" for text in mixed)
        with atomic_write(work / f"{name}.jsonl", unique=True) as file:
            file.write_text("".join(lines), encoding="utf-8")
    return work / "train.jsonl", work / "valid.jsonl"


def run_recipe(recipe: Recipe) -> Path:
    """Train a recipe to its end, or resume it; the run's folder."""
    assert recipe.out is not None
    folder = Path(recipe.out)
    if not (folder / "model").exists():
        result = train(recipe, is_run(folder))
        if result.status != "finished":
            raise SystemExit(f"{folder}: the run ended as {result.status}")
    return folder


def train_base(work: Path, texts: tuple[Path, Path], sizes: Sizes, seed: int, device: str) -> Path:
    """A model trained from scratch at the short length."""
    data = {"train": str(texts[0]), "valid": str(texts[1]), "sequence_length": sizes.length, **sizes.tokenizer}
    options = {"steps": sizes.steps, "batch_tokens": sizes.batch_tokens, "seed": seed, "device": device}
    return run_recipe(
        Recipe(
            model={"preset": "llama-2", **sizes.model, "max_length": sizes.length},
            data=DataConfig(**data),
            train=TrainConfig(**options, evaluate_every=sizes.steps),
            optimizer=OptimizerConfig(lr=sizes.lr),
            schedule=CosineSchedule(warmup=sizes.steps // 20),
            save=SaveConfig(every=max(sizes.steps // 4, 1), keep=1),
            out=str(work / f"base-{seed}"),
        )
    )


def tune(work: Path, base: Path, texts: tuple[Path, Path], sizes: Sizes, seed: int, device: str) -> dict[str, Path]:
    """The same model after some steps: in each extension, and plain, at 8 times the length; and at the short length."""
    to = 8 * sizes.length
    tuned = {}
    for method in TUNED:
        tuned[method] = work / f"{method}-{seed}"
        if not tuned[method].exists():
            done = extend(
                base, tuned[method], to=to, method=method, train=texts[0], valid=texts[1], steps=sizes.tune_steps,
                lr=sizes.tune_lr, batch_tokens=max(sizes.batch_tokens, to), seed=seed, device=device,
            )  # fmt: skip
            if done.status != "finished":
                raise SystemExit(f"{tuned[method]}: the run ended as {done.status}")
    config = phasor.load(base).config
    for name, length in (("none", to), ("window", sizes.length)):
        wanted = extend_config(config, "none", length)
        recipe = fine_tuning(config, wanted, "ordinary", length).replace(
            init_from=str(base / "model"), out=str(work / f"{name}-{seed}"),
            optimizer=OptimizerConfig(lr=sizes.tune_lr, weight_decay=0.0),
        )  # fmt: skip
        batch_tokens = max(sizes.batch_tokens, to)
        tuned[name] = run_recipe(with_texts(recipe, texts[0], texts[1], sizes.tune_steps, batch_tokens, seed, device))
    return tuned


def losses_of(result: dict[str, Any], name: str, length: int) -> list[float]:
    return next(r["losses"] for r in result["rows"] if (r["extension"], r["length"]) == (name, length))


def compare(losses: dict[str, list[float]], result: dict[str, Any]) -> dict[str, Any]:
    """The mean losses of one seed, and its pairs, over the documents or rows of a result."""
    weights = result["unit_weights"]
    total = sum(weights)
    means = {name: sum(w * x for w, x in zip(weights, each, strict=True)) / total for name, each in losses.items()}
    return {"loss": means, "pairs": compare_pairs(losses, weights), "units": f"{len(weights)} {result['unit']}s"}


def state_orders(seeds: list[dict[str, Any]]) -> list[str]:
    """Pairs by their mean loss over seeds; an order is stated where every seed shows it."""
    names = sorted(seeds[0]["loss"], key=lambda name: sum(seed["loss"][name] for seed in seeds))
    lines = []
    for first, second in combinations(names, 2):
        shown = [
            any((p["first"], p["second"], p["shown"]) == (first, second, True) for p in seed["pairs"]) for seed in seeds
        ]
        lines.append(
            f"{first} < {second}" + ("" if all(shown) else f": not shown ({sum(shown)} of {len(shown)} seeds)")
        )
    return lines


def measure_seed(work: Path, texts: tuple[Path, Path], sizes: Sizes, seed: int, device: str) -> dict[str, Any]:
    """Both comparisons of one seed, each at its length and at the trained one; from WORK where they are there."""
    file = work / f"seed-{seed}.json"
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text())
        return kept
    base = train_base(work, texts, sizes, seed, device)
    far, tuned_length = 4 * sizes.length, 8 * sizes.length
    options: dict[str, Any] = {"limit": sizes.rows, "device": device, "targets": min(256, sizes.length // 2)}
    untuned = evaluate_lengths(base, texts[1], lengths=[sizes.length, far], extensions=UNTUNED, **options)
    models = tune(work, base, texts, sizes, seed, device)
    tuned = {
        name: evaluate_lengths(folder, texts[1], lengths=[sizes.length, tuned_length], extensions=["own"], **options)
        for name, folder in models.items()
    }
    found = {}
    for length in (sizes.length, far):
        names = [*UNTUNED, "window"]
        each = {name: losses_of(untuned, name, length) for name in names}
        found[f"untuned, one factor for {far}, at {length}"] = compare(each, untuned)
    for length in (sizes.length, tuned_length):
        each = {
            name: losses_of(result, "window" if name == "window" else "own", length) for name, result in tuned.items()
        }
        found[f"after {sizes.tune_steps} steps, one factor for {tuned_length}, at {length}"] = compare(
            each, tuned["window"]
        )
    file.write_text(json.dumps(found) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for texts and runs")
    parser.add_argument("--wikitext", type=Path, help="folder with wikitext-2-train.txt.gz and wikitext-2-valid.txt.gz")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a few minutes on a CPU")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="train and measure one seed, and stop there")
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON")
    given = parser.parse_args()
    sizes = SMALL if given.small else LARGE
    out = given.out or Path(__file__).parent / "results" / f"extensions{'-small' * given.small}.json"
    given.work.mkdir(parents=True, exist_ok=True)
    texts = given.work / "train.jsonl", given.work / "valid.jsonl"
    if not texts[1].exists():
        texts = write_texts(given.work, given.wikitext, sizes.files)
    if given.seed is not None:
        measure_seed(given.work, texts, sizes, given.seed, given.device)
        return
    seeds = [measure_seed(given.work, texts, sizes, seed, given.device) for seed in SEEDS]
    parameters = sum(weight.numel() for weight in phasor.load(given.work / f"base-{SEEDS[0]}").parameters())
    results: dict[str, Any] = {}
    for title in seeds[0]:
        each = [seed[title] for seed in seeds]
        results[title] = {"orders": state_orders(each), "seeds": each}
        print(f"\n{title} tokens, {each[0]['units']}")
        for name in sorted(each[0]["loss"], key=each[0]["loss"].get):
            print(f"  {name:8} " + "  ".join(f"{seed['loss'][name]:.4f}" for seed in each))
        print("\n".join(f"  {line}" for line in results[title]["orders"]))
    print("\npublished\n" + "\n".join(f"  {line}" for line in PUBLISHED))
    about = provenance(None, phasor.load(given.work / f"base-{SEEDS[0]}", given.device).tokens.weight.device)
    about |= {
        "parameters": parameters,
        "seeds": SEEDS,
        "trained_length": sizes.length,
        "wikitext": bool(given.wikitext),
    }
    out.write_text(json.dumps({"about": about, "results": results, "published": PUBLISHED}, indent=1) + "\n")


if __name__ == "__main__":
    main()
