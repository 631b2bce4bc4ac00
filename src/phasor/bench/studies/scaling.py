"""Time and memory of one attention against the length of the sequence: all tokens, and a window of 1,024.

A length whose call would take longer than `patience` seconds is left out, and so are all after it. Before a length is
timed, the last queries' results, and the gradients of the last tokens, are compared with float64.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.bench.attention import AttentionInputs
from phasor.bench.study import Study, format_field
from phasor.config.schema import Config
from phasor.ops.attention import Mask, ScoreMod, attention

WINDOW, LONG, LAST = 1024, 10.0, 16
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}
RULES = {"all tokens": Mask(causal=True), f"window of {WINDOW}": Mask(causal=True, window=WINDOW)}


class ScalingSettings(Config):
    """The shortest and the longest sequence, and how many seconds a call may take."""

    shortest: int = 1024
    longest: int = 1 << 20
    longest_backward: int = 1 << 20
    patience: float = 90.0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


GPU = ScalingSettings()
CPU = ScalingSettings(longest=1 << 14, longest_backward=1 << 12, heads=4, kv_heads=2, head_dim=64)
TINY = CPU.replace(shortest=64, longest=256, longest_backward=64, head_dim=8)


def run(study: Study) -> None:
    settings: ScalingSettings = study.settings
    study.result["rows"] = []
    slopes = study.result["slopes"] = {}
    for both, longest in ((False, settings.longest), (True, settings.longest_backward)):
        for name in RULES:
            own = series(study, name, both, longest)
            label = f"{name}{', forward and backward' if both else ''}"
            slopes[label] = {what: slope(own, what) for what in ("seconds", "bytes")}
            study.say(format_field(f"slopes of {label}", slopes[label]))


def series(study: Study, name: str, both: bool, longest: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tokens, last = study.settings.shortest, 0.0
    while tokens <= longest and last * (16 if name == "all tokens" else 4) < study.settings.patience:
        try:
            row = {"rule": name, "both": both, "tokens": tokens, **measure(study, name, tokens, both)}
        except torch.OutOfMemoryError:
            study.say(f"{name:16} {tokens:8} does not fit")
            break
        rows.append(row)
        study.add_row(row)
        tokens, last = tokens * 4, row["seconds"]
    return rows


def measure(study: Study, name: str, tokens: int, both: bool) -> dict[str, float]:
    """Seconds of a call, the median of three after one if that was short, and the most bytes held beside the inputs."""
    settings: ScalingSettings = study.settings
    sizes = settings.head_dim, settings.heads, settings.kv_heads
    case, rule = AttentionInputs(study.device, tokens, *sizes, study.machine.dtype), RULES[name]
    case.grad(both)
    score_mod = ScoreMod(scale=settings.head_dim**-0.5)

    def call() -> list[Tensor]:
        y = attention(*case.inputs, Mask(causal=rule.causal, window=rule.window), score_mod)
        return [y, *torch.autograd.grad(y.sum(), case.inputs)] if both else [y]

    outputs, seconds, held = run_with_stats(call, study)
    found = [x[0, -LAST:].detach().double() for x in outputs]
    del outputs
    off = last_tokens_error(found, case.inputs, rule, score_mod.scale)
    study.check(f"{name} at {tokens} tokens", off, TOLERANCE[study.device.type])
    if seconds <= LONG:
        again = [run_with_stats(call, study)[1:] for _ in range(3)]
        seconds, held = statistics.median(s for s, _ in again), again[-1][1]
    return {"seconds": seconds, "error": off, **({"bytes": float(held)} if study.on_gpu else {})}


def last_tokens_error(found: list[Tensor], given: Sequence[Tensor], rule: Mask, scale: float) -> float:
    """The largest difference from float64 in the last tokens' result and gradients, of the largest value of each.

    The keys and values of the last tokens are seen by the last queries alone, so these say all of their gradients.
    """
    tokens = given[0].shape[1]
    first = max(0, tokens - LAST - (rule.window or tokens))
    q = given[0][0, -LAST:].detach().double().requires_grad_()
    k, v = (x[0, first:].detach().double().requires_grad_() for x in given[1:])
    scores = torch.einsum("qgrd,kgd->grqk", q.unflatten(1, (k.shape[1], -1)), k) * scale
    distance = torch.arange(-LAST, 0, device=q.device)[:, None] - torch.arange(first - tokens, 0, device=q.device)
    seen = (distance >= 0) & (distance < (rule.window or tokens))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    y = torch.einsum("grqk,kgd->qgrd", weights, v).flatten(1, 2)
    expected = [y.detach(), *(x[-LAST:] for x in torch.autograd.grad(y.sum(), (q, k, v)))][: len(found)]
    off = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(off).max())  # not a number where one of them is not


def run_with_stats(call: Callable[[], list[Tensor]], study: Study) -> tuple[list[Tensor], float, int]:
    """What a call makes, the seconds it takes, and the most bytes it held on a GPU beside what was there."""
    before = torch.cuda.memory_allocated() if study.on_gpu else 0
    if study.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    study.machine.timer.wait()
    begun = time.perf_counter()
    outputs = call()
    study.machine.timer.wait()
    seconds = time.perf_counter() - begun
    return outputs, seconds, torch.cuda.max_memory_allocated() - before if study.on_gpu else 0


def slope(rows: list[dict[str, Any]], what: str) -> float | None:
    """How fast the last two grow: the difference of logarithms."""
    if len(rows) < 2 or what not in rows[-1]:
        return None
    a, b = rows[-2:]
    return math.log(b[what] / a[what]) / math.log(b["tokens"] / a["tokens"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Logarithmic axes, on which linear growth has slope 1 and quadratic growth slope 2."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    kinds = [what for what in ("seconds", "bytes") if what in rows[0]]
    figure = Figure(figsize=(6 * len(kinds), 4.5), layout="constrained")
    for axis, what in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for name in RULES:
            for both in (False, True):
                own = [row for row in rows if row["rule"] == name and row["both"] == both]
                grows = slope(own, what)
                label = f"{name}, {'forward and backward' if both else 'forward'}"
                label += "" if grows is None else f": slope {grows:.2f}"
                axis.loglog([row["tokens"] for row in own], [row[what] for row in own], marker="o", label=label)
        axis.set_xlabel("tokens")
        axis.set_ylabel(what)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
