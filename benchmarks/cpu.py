"""Forward and backward of a Llama-shaped model on the CPU, beside transformers' own Llama in the same process.

Both models hold the same weights; the results are compared before anything is timed. Runs alternate, so
that whatever else the machine does falls on both, and the medians' ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from llama import SHAPE, pair


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.float().logsumexp(-1).mean().backward()
    return time.perf_counter() - start, logits.detach()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--tokens", type=int, default=512)
    given = options.parse_args()
    ours, theirs = pair()
    tokens = torch.randint(0, SHAPE["vocab_size"], (given.batch, given.tokens))
    (_, a), (_, b) = step(ours, tokens), step(theirs, tokens)
    difference = float((a - b).abs().max() / b.abs().max())
    print(f"largest difference of the logits, relative: {difference:.1e}")
    if not difference < 1e-4:
        raise SystemExit("the two models disagree: nothing is timed")
    times: dict[str, list[float]] = {"phasor": [], "transformers": []}
    for _ in range(given.runs):
        times["phasor"].append(step(ours, tokens)[0])
        times["transformers"].append(step(theirs, tokens)[0])
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / t for p, t in zip(times["phasor"], times["transformers"], strict=True)]
    for name, value in medians.items():
        print(f"{name:13} {value * 1e3:8.1f} ms forward + backward (median of {given.runs})")
    ratio = medians["phasor"] / medians["transformers"]
    print(f"phasor / transformers: {ratio:.3f} (runs {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
