"""Time and memory of one attention against the length of the sequence: all tokens, and a window of 1,024.

    python benchmarks/scaling.py [--longest 1048576] [--out benchmarks/results/scaling.json]

Writes the numbers, and beside them a plot on logarithmic axes, where linear growth has slope 1 and quadratic slope 2.
On a CPU it goes to 16,384 tokens unless told otherwise, with fewer heads. A length whose call would take longer than
`--patience` seconds is left out, and so are all after it. Before a length is timed, the last queries' results, and the
gradients of the last tokens, are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phasor.ops.attention import Mask, ScoreMod, attention

WINDOW, LONG, LAST = 1024, 10.0, 16
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}
RULES = {"all tokens": Mask(causal=True), f"window of {WINDOW}": Mask(causal=True, window=WINDOW)}


def inputs(tokens: int, device: str, gradients: bool) -> list[torch.Tensor]:
    num_heads, num_kv_heads, head_dim = (32, 8, 128) if device == "cuda" else (4, 2, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(1, tokens, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_(gradients) for s in shapes]


def measure(rule: Mask, tokens: int, device: str, both: bool) -> dict[str, float]:
    """Seconds of a call, the median of three after one if that was short, and the most bytes held beside the inputs."""
    given = inputs(tokens, device, both)
    score_mod = ScoreMod(scale=given[0].shape[-1] ** -0.5)

    def run() -> list[torch.Tensor]:
        y = attention(*given, Mask(causal=rule.causal, window=rule.window), score_mod)
        return [y, *torch.autograd.grad(y.sum(), given)] if both else [y]

    outputs, seconds, held = run_with_stats(run, device)
    found = [x[0, -LAST:].detach().double() for x in outputs]
    del outputs
    off = error(found, given, rule, score_mod.scale)
    if not off <= TOLERANCE[device]:
        raise SystemExit(f"wrong at {tokens} tokens: off by {off:.1e} of the largest, allowed are {TOLERANCE[device]}")
    if seconds <= LONG:
        again = [run_with_stats(run, device)[1:] for _ in range(3)]
        seconds, held = statistics.median(s for s, _ in again), again[-1][1]
    return {"seconds": seconds, "error": off, **({"bytes": float(held)} if device == "cuda" else {})}


def error(found: list[torch.Tensor], given: list[torch.Tensor], rule: Mask, scale: float) -> float:
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


def run_with_stats(run: Callable[[], list[torch.Tensor]], device: str) -> tuple[list[torch.Tensor], float, int]:
    """What `run` makes, the seconds it takes, and the most bytes it held on a GPU beside what was there."""
    before = 0
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begun = time.perf_counter()
    outputs = run()
    if device == "cuda":
        torch.cuda.synchronize()
        return outputs, time.perf_counter() - begun, torch.cuda.max_memory_allocated() - before
    return outputs, time.perf_counter() - begun, 0


def series(name: str, device: str, both: bool, longest: int, patience: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tokens, last = 1024, 0.0
    while tokens <= longest and last * (16 if name == "all tokens" else 4) < patience:
        try:
            row = {"rule": name, "both": both, "tokens": tokens, **measure(RULES[name], tokens, device, both)}
        except torch.OutOfMemoryError:
            print(f"{name:16} {tokens:8} does not fit")
            break
        rows.append(row)
        held = f"{row['bytes'] / 2**20:9.1f} MiB" if "bytes" in row else ""
        way = "forward and backward" if both else "forward"
        print(
            f"{name:16} {way:20} {tokens:8} tokens {row['seconds'] * 1e3:10.3f} ms {held} off {row['error']:.1e}",
            flush=True,
        )
        tokens, last = tokens * 4, row["seconds"]
    return rows


def slope(rows: list[dict[str, Any]], what: str) -> float | None:
    """How fast the last two grow: the difference of logarithms."""
    if len(rows) < 2 or what not in rows[-1]:
        return None
    a, b = rows[-2:]
    return math.log(b[what] / a[what]) / math.log(b["tokens"] / a["tokens"])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [w for w in ("seconds", "bytes") if w in rows[0]]
    figure, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 4.5), squeeze=False)
    for axis, what in zip(axes[0], kinds, strict=True):
        for name in RULES:
            for both in (False, True):
                own = [r for r in rows if r["rule"] == name and r["both"] == both]
                if own:
                    grows = slope(own, what)
                    label = f"{name}, {'forward and backward' if both else 'forward'}"
                    label += "" if grows is None else f": slope {grows:.2f}"
                    axis.loglog([r["tokens"] for r in own], [r[what] for r in own], marker="o", label=label)
        axis.set_xlabel("tokens")
        axis.set_ylabel(what)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--longest", type=int, default=1 << 20 if device == "cuda" else 1 << 14)
    options.add_argument("--longest-backward", type=int, default=1 << 20 if device == "cuda" else 1 << 12)
    options.add_argument("--patience", type=float, default=90.0, help="seconds that one call may take")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling.json"))
    given = options.parse_args()
    rows = []
    for both, longest in ((False, given.longest), (True, given.longest_backward)):
        for name in RULES:
            rows += series(name, device, both, longest, given.patience)
    slopes = {}
    for both in (False, True):
        for name in RULES:
            own = [r for r in rows if r["rule"] == name and r["both"] == both]
            slopes[f"{name}{', forward and backward' if both else ''}"] = {
                what: slope(own, what) for what in ("seconds", "bytes")
            }
    print(json.dumps(slopes, indent=1))
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result = {"device": where, "torch": torch.__version__, "rows": rows, "slopes": slopes}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    try:
        plot(rows, given.out.with_suffix(".png"))
    except ImportError:
        print("no plot without matplotlib")


if __name__ == "__main__":
    main()
