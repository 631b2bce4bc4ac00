"""Cached greedy decoding on the CPU, compared with transformers' generate in the same process; and cost against length.

Both models hold the same weights and must give the same tokens before anything is timed, plain and with the step
compiled (which happens before the timing). Runs alternate, and the medians' ratio is what counts. The curve shows
the cost of a token against the tokens generated before it, for full attention and for a window.

    python benchmarks/decode.py [--tokens 256] [--runs 5] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch

import phasor
from phasor.bench.llama import llama_pair
from phasor.bench.sizes import CPU_LLAMA
from phasor.bench.timing import alternate

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def compare(prompts: list[list[int]], tokens: int, runs: int) -> dict[str, float]:
    ours, theirs = llama_pair(CPU_LLAMA)
    ours.eval()
    theirs.eval()
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def run_ours(compile: bool) -> list[list[int]]:
        return phasor.generate(ours, prompts, max_new_tokens=tokens, compile=compile)

    def run_theirs() -> list[list[int]]:
        out = theirs.generate(
            padded, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return out[:, width:].tolist()

    calls: dict[str, Callable[[], object]] = {
        "phasor": lambda: run_ours(False),
        "phasor, compiled": lambda: run_ours(True),
        "transformers": run_theirs,
    }
    if any(call() != calls["transformers"]() for call in calls.values()):
        raise SystemExit("they do not give the same tokens: nothing is timed")
    return {name: statistics.median(values) for name, values in alternate(calls, runs).items()}


def curve(window: int | None, count: int, every: int) -> list[tuple[int, float]]:
    """Milliseconds per token, after so many tokens; the least of several tokens in a row."""
    changes = {} if window is None else {"attention": phasor.AttentionConfig(window=window)}
    ours, _ = llama_pair(CPU_LLAMA, **changes)
    cache = ours.eval().new_cache(1, count + 1)
    found = []
    with torch.inference_mode():
        tokens = torch.randint(0, CPU_LLAMA["vocab_size"], (1, count))
        for start in range(0, count - every, every):
            ours(tokens[:, start : start + every - 8], cache=cache)
            steps = []
            for at in range(start + every - 8, start + every):
                begun = time.perf_counter()
                ours(tokens[:, at : at + 1], cache=cache)
                steps.append(time.perf_counter() - begun)
            found.append((start + every, 1e3 * min(steps)))
    return found


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for (name, points), color in zip(curves.items(), ("#0072b2", "#e69f00"), strict=True):
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
    axis.set_xlabel("tokens in the cache")
    axis.set_ylabel("milliseconds for the next token")
    axis.set_ylim(bottom=0)
    axis.set_title("Cached decoding on the CPU: cost of a token")
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(1, CPU_LLAMA["vocab_size"], (length,), generator=generator).tolist()

    result: dict[str, object] = {}
    for name, prompts in {
        "batch 1, prompt 16": [prompt(16)],
        "batch 8, prompts of 5 to 40": [prompt(n) for n in (5, 40, 17, 9, 33, 12, 26, 21)],
    }.items():
        found = compare(prompts, given.tokens, given.runs)
        result[name] = found
        print(name)
        for who, took in found.items():
            ratio = found["transformers"] / took
            print(f"  {who}: {len(prompts) * given.tokens / took:.1f} tokens/s, {ratio:.2f} times transformers")
    curves = {
        "full attention": curve(None, given.length, 256),
        "window of 256": curve(256, given.length, 256),
    }
    result["milliseconds per token against tokens in the cache"] = curves
    for name, points in curves.items():
        print(
            f"{name}: {points[0][1]:.1f} ms after {points[0][0]} tokens, {points[-1][1]:.1f} ms after {points[-1][0]}"
        )
    draw(curves, given.out / "decode.png")
    (given.out / "decode.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
