"""What an eager forward and backward cost on the host, by family: phasor and transformers on the same weights.

The models are so narrow that arithmetic takes next to no time: what is left is Python, and the dispatch of operations.
Logits and gradients are compared first. An operation is a call of torch's dispatcher that is no view; on a GPU
each is a kernel launch or more. Times are of this process's processor, the least of many alternating calls, so that
other load on the machine matters little.

    python benchmarks/host.py [--family gpt-2 ...] [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from phasor.bench import FAMILIES
from phasor.bench.families import family_pair, logits_of
from phasor.bench.sizes import FamilySizes

ROWS, TOKENS = 4, 8
SIZES = FamilySizes(64, 12, 4, 2, 100, 4, 4, False, ((ROWS, TOKENS),), (1,), TOKENS, TOKENS)
TOLERANCE = 1e-4  # of the largest logit, or gradient
Call = Callable[[], torch.Tensor]


class CountOperations(TorchDispatchMode):
    """How many operations run inside, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def check(family: str, tables: tuple[torch.Tensor, torch.Tensor], calls: tuple[Call, Call]) -> None:
    """Logits agree, and so do the gradients of the token tables, which depend on all others; or nothing is measured."""
    logits = [call() for call in calls]
    for out in logits:
        out.logsumexp(-1).mean().backward()
    gradients = [table.grad for table in tables]
    for what, (a, b) in {"logits": logits, "gradients": gradients}.items():
        difference = float((a - b).detach().abs().max() / b.detach().abs().max())
        if not difference < TOLERANCE:
            raise SystemExit(f"{family}: the {what} differ by {difference:.1e}, and nothing is measured")


def operations(call: Call) -> tuple[list[str], list[str]]:
    """The operations of a forward and of its backward."""
    with CountOperations() as forward:
        out = call()
    grad = torch.ones_like(out)
    with CountOperations() as backward:
        out.backward(grad)
    return forward.names, backward.names


def host_seconds(calls: tuple[Call, Call], runs: int) -> list[tuple[float, float]]:
    """The least processor time of a forward and of a backward, for each model, in alternating calls."""
    best = [(float("inf"), float("inf"))] * len(calls)
    for _ in range(runs):
        for index, call in enumerate(calls):
            begun = time.process_time()
            out = call()
            middle = time.process_time()
            out.backward(torch.ones_like(out))
            ended = time.process_time()
            best[index] = min(best[index][0], middle - begun), min(best[index][1], ended - middle)
    return best


def measure(family: str, runs: int) -> dict[str, float]:
    models = family_pair(family, SIZES, torch.device("cpu"), torch.float32)
    tokens = torch.randint(3, SIZES.vocabulary, (ROWS, TOKENS))
    calls = partial(logits_of, models[0], tokens), partial(logits_of, models[1], tokens)
    check(family, (models[0].tokens.weight, models[1].get_input_embeddings().weight), calls)
    row: dict[str, float] = {}
    seconds = host_seconds(calls, runs)
    for who, call, (forward, backward) in zip(("ours", "theirs"), calls, seconds, strict=True):
        counts = [len(names) / SIZES.layers for names in operations(call)]
        row |= {f"{who} ops forward": counts[0], f"{who} ops backward": counts[1]}
        row |= {f"{who} us forward": 1e6 * forward / SIZES.layers, f"{who} us backward": 1e6 * backward / SIZES.layers}
    row["ratio"] = sum(seconds[1]) / sum(seconds[0])
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument("--runs", type=int, default=60)
    options.add_argument("--out", type=Path, help="a JSON file for the results")
    given = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"{'per layer':12} {'operations, forward + backward':>42} {'host microseconds, forward + backward':>50}")
    results = {}
    for family in given.family:
        row = results[family] = measure(family, given.runs)
        ops = [f"{row[f'{who} ops forward']:5.1f} + {row[f'{who} ops backward']:5.1f}" for who in ("ours", "theirs")]
        us = [f"{row[f'{who} us forward']:6.0f} + {row[f'{who} us backward']:6.0f}" for who in ("ours", "theirs")]
        text = f"{family:12} phasor {ops[0]}, transformers {ops[1]}   phasor {us[0]}, transformers {us[1]}"
        print(f"{text}   {row['ratio']:.2f} x", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
