"""Cached greedy decoding on the CPU beside transformers' generate in the same process; and cost against length.

Both models hold the same weights and must give the same tokens before anything is timed, plain and with the step
compiled (which happens before the timing). Runs alternate, and the medians' ratio is what counts. The curve shows
the cost of a token against the tokens generated before it, for full attention and for a window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phasor.bench.llama import llama_pair
from phasor.bench.peers import require, transformers_tokens
from phasor.bench.study import Study
from phasor.bench.timing import alternate, call_seconds
from phasor.config.schema import Config
from phasor.generation import generate
from phasor.models.presets import preset
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.transformer import Transformer


class DecodeCPUSettings(Config):
    """New tokens, runs of each, and the length of the curve, with a point at every multiple of `every`."""

    tokens: int = 256
    runs: int = 5
    length: int = 4096
    every: int = 256
    compiled: bool = True
    prompts: tuple[int, ...] = (5, 40, 17, 9, 33, 12, 26, 21)  # lengths of the prompts of a batch


CPU = DecodeCPUSettings()
TINY = DecodeCPUSettings(tokens=4, runs=1, length=48, every=16, compiled=False, prompts=(3, 7))


def run(study: Study) -> None:
    require("transformers", "decode-cpu")
    settings: DecodeCPUSettings = study.settings
    sizes = study.machine.sizes.cpu_model
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        tokens: list[int] = torch.randint(1, sizes["vocab_size"], (length,), generator=generator).tolist()
        return tokens

    batch = [prompt(n) for n in settings.prompts]
    lengths = f"prompts of {min(settings.prompts)} to {max(settings.prompts)}"
    for name, prompts in {"batch 1, prompt 16": [prompt(16)], f"batch {len(batch)}, {lengths}": batch}.items():
        found = study.result[name] = compare(study, sizes, prompts)
        study.say(name)
        for who, took in found.items():
            rate, ratio = len(prompts) * settings.tokens / took, found["transformers"] / took
            study.say(f"  {who}: {rate:.1f} tokens/s, {ratio:.2f} times transformers")
        study.save()
    window = settings.every
    curves = study.result["milliseconds per token against tokens in the cache"] = {
        "full attention": curve(settings, sizes, None),
        f"window of {window}": curve(settings, sizes, window),
    }
    for name, points in curves.items():
        (first, least), (last, most) = points[0], points[-1]
        study.say(f"{name}: {least:.1f} ms after {first} tokens, {most:.1f} ms after {last}")


def compare(study: Study, sizes: dict[str, Any], prompts: list[list[int]]) -> dict[str, float]:
    """Median seconds of each."""
    tokens = study.settings.tokens
    ours, theirs = llama_pair(sizes)

    def by_phasor(compile: bool) -> Callable[[], list[list[int]]]:
        return lambda: generate(ours, prompts, max_new_tokens=tokens, compile=compile)

    calls: dict[str, Callable[[], object]] = {"phasor": by_phasor(False)}
    if study.settings.compiled:
        calls["phasor, compiled"] = by_phasor(True)
    calls["transformers"] = lambda: transformers_tokens(theirs, prompts, tokens)
    expected = calls["transformers"]()
    for name, call in calls.items():
        if call() != expected:
            raise ValueError(f"{name} does not give the tokens of transformers: nothing is timed")
    return {name: statistics.median(values) for name, values in alternate(calls, study.settings.runs).items()}


def curve(settings: DecodeCPUSettings, sizes: dict[str, Any], window: int | None) -> list[tuple[int, float]]:
    """Milliseconds per token after each multiple of `every` tokens; the least of several tokens in a row."""
    torch.manual_seed(0)
    changes = {} if window is None else {"attention": SoftmaxAttentionConfig(window=window)}
    model = Transformer(preset("llama-2", **sizes, **changes)).eval()
    count, every = settings.length, settings.every
    cache, found = model.new_cache(1, count + 1), []
    with torch.inference_mode():
        tokens = torch.randint(0, sizes["vocab_size"], (1, count))
        for start in range(0, count - every, every):
            end = start + every
            model(tokens[:, start : end - 8], cache=cache)
            columns = tokens[:, end - 8 : end].split(1, dim=1)
            steps = [call_seconds(partial(model, column, cache=cache)) for column in columns]
            found.append((end, 1e3 * min(steps)))
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.add_subplot(xlabel="tokens in the cache", ylabel="milliseconds for the next token")
    curves = result["milliseconds per token against tokens in the cache"]
    for (name, points), color in zip(curves.items(), ("#0072b2", "#e69f00"), strict=True):
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
    axis.set_ylim(bottom=0)
    axis.set_title("Cached decoding on the CPU: cost of a token")
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
