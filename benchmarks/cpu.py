"""Forward and backward of a Llama-shaped model on the CPU, compared with transformers' Llama in the same process.

Both models hold the same weights; the results are compared before anything is timed. Runs alternate, so
that whatever else the machine does falls on both, and the medians' ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from phasor.bench.llama import llama_pair
from phasor.bench.sizes import CPU_LLAMA
from phasor.bench.timing import alternate


def step(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a forward pass, after its backward pass."""
    model.zero_grad(set_to_none=True)
    out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.float().logsumexp(-1).mean().backward()
    return logits.detach()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--tokens", type=int, default=512)
    given = options.parse_args()
    ours, theirs = llama_pair(CPU_LLAMA)
    tokens = torch.randint(0, CPU_LLAMA["vocab_size"], (given.batch, given.tokens))
    a, b = step(ours, tokens), step(theirs, tokens)
    difference = float((a - b).abs().max() / b.abs().max())
    print(f"largest difference of the logits, relative: {difference:.1e}")
    if not difference < 1e-4:
        raise SystemExit("the two models disagree: nothing is timed")
    times = alternate({"phasor": lambda: step(ours, tokens), "transformers": lambda: step(theirs, tokens)}, given.runs)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / t for p, t in zip(times["phasor"], times["transformers"], strict=True)]
    for name, value in medians.items():
        print(f"{name:13} {value * 1e3:8.1f} ms forward + backward (median of {given.runs})")
    ratio = medians["phasor"] / medians["transformers"]
    print(f"phasor / transformers: {ratio:.3f} (runs {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
