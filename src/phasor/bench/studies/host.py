"""What an eager forward and backward cost on the host, by family: phasor and transformers on the same weights.

The models are so narrow that arithmetic takes next to no time: what is left is Python, and the dispatch of operations.
Logits and gradients are compared first. An operation is a call of torch's dispatcher that is no view; on a GPU
each is a kernel launch or more. Times are of this process's processor, the least of many alternating calls, so that
other load on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phasor.bench import FAMILIES
from phasor.bench.families import check_families, family_pair, logits_of
from phasor.bench.peers import require
from phasor.bench.sizes import FamilySizes
from phasor.bench.study import Study, format_field
from phasor.config.schema import Config

ROWS, TOKENS = 4, 8
TOLERANCE = 1e-4  # of the largest logit, or gradient
Call = Callable[[], Tensor]


class HostSettings(Config):
    """The families, the layers of their models, and how many calls the least is of."""

    families: tuple[str, ...] = FAMILIES
    layers: int = 12
    runs: int = 60

    def check(self) -> None:
        check_families(self.families)


def run(study: Study) -> None:
    require("transformers", "host")
    settings: HostSettings = study.settings
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    study.say("per layer: operations and microseconds of the host, forward + backward")
    try:
        for family in settings.families:
            row = study.result[family] = measure(study, family)
            study.say(format_field(family, row))
            study.save()
    finally:
        torch.set_num_threads(threads)


def measure(study: Study, family: str) -> dict[str, float]:
    layers = study.settings.layers
    sizes = FamilySizes(64, layers, 4, 2, 100, 4, 4, False, ((ROWS, TOKENS),), (1,), TOKENS, TOKENS)
    models = family_pair(family, sizes, torch.device("cpu"), torch.float32)
    tokens = torch.randint(3, sizes.vocabulary, (ROWS, TOKENS))
    calls: list[Call] = [partial(logits_of, model, tokens) for model in models]
    logits = [call() for call in calls]
    for out in logits:
        out.logsumexp(-1).mean().backward()
    tables = [models[0].tokens.weight.grad, models[1].get_input_embeddings().weight.grad]
    for what, (ours, theirs) in {"logits": logits, "gradients": tables}.items():
        assert ours is not None
        assert theirs is not None
        off = float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
        study.check(f"{family}: {what}", off, TOLERANCE)
    row: dict[str, float] = {}
    seconds = host_seconds(calls, study.settings.runs)
    for who, call, (forward, backward) in zip(("ours", "theirs"), calls, seconds, strict=True):
        counts = [count / layers for count in count_operations(call)]
        row |= {f"{who} ops forward": counts[0], f"{who} ops backward": counts[1]}
        row |= {f"{who} us forward": 1e6 * forward / layers, f"{who} us backward": 1e6 * backward / layers}
    row["ratio"] = sum(seconds[1]) / sum(seconds[0])
    return row


class OperationCounter(TorchDispatchMode):
    """How many operations run inside, views not counted."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_operations(call: Call) -> tuple[int, int]:
    """The operations of a forward and of its backward."""
    with OperationCounter() as forward:
        out = call()
    grad = torch.ones_like(out)
    with OperationCounter() as backward:
        out.backward(grad)
    return forward.count, backward.count


def host_seconds(calls: list[Call], runs: int) -> list[tuple[float, float]]:
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


CPU = HostSettings()
TINY = HostSettings(families=("gpt-2",), layers=2, runs=1)
