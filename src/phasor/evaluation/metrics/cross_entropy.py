"""The cross-entropy of all tokens of a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from phasor.data.batch import Batch
from phasor.evaluation.run import TrainedRun
from phasor.nn.norm import at_least_float32


def totals(trained: TrainedRun, batches: Iterable[Batch], report: Callable[[int], None]) -> tuple[float, int, int]:
    """The nats of all tokens that count, how many they are, and for how many the target is the most likely.

    They are added up in float64 on the device, which is waited for at the end. Of several processes each takes some of
    the rows of a batch.
    """
    processes = trained.processes
    sums = torch.zeros(3, dtype=torch.float64, device=trained.device)
    for number, batch in enumerate(batches, 1):
        rows = batch if processes.size == 1 else batch.share(*processes.share)
        here = rows.to(trained.device)
        logits = at_least_float32(trained.model(*here.inputs, **here.sequence_args))
        each = F.cross_entropy(logits.flatten(0, 1), here.targets.flatten(), reduction="none").view_as(here.targets)
        counts = here.weights > 0
        correct = counts & (logits.argmax(-1) == here.targets)
        sums += torch.stack([torch.where(counts, each.double(), 0.0).sum(), counts.sum(), correct.sum()])
        report(number)
    nats, tokens, correct_tokens = processes.sum(sums).tolist()
    return nats, int(tokens), int(correct_tokens)


def perplexity(loss: float) -> float:
    """The perplexity of a loss; infinite where no float is so large."""
    return math.exp(loss) if not loss > 700 else math.inf
