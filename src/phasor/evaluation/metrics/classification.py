"""The metrics of classifiers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.data.batches import Batches
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress
from phasor.nn.norm import at_least_float32
from phasor.training.objectives.classification import classify


def classification_metrics(
    trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress
) -> dict[str, Any]:
    """Accuracy, macro F1 and the loss of labels; of words those of their first tokens."""
    batches = Batches(texts.store, trained.recipe, special=trained.special, shuffled=False)
    count = len(trained.model.config.head.labels)  # type: ignore[attr-defined]
    confusion = torch.zeros(count, count, dtype=torch.float64, device=trained.device)  # true by predicted
    nats = torch.zeros((), dtype=torch.float64, device=trained.device)
    for number, batch in enumerate(batches.stream(0, batches.per_epoch), 1):
        here = batch.share(*trained.processes.share).to(trained.device)
        scores = at_least_float32(classify(trained.model, here))
        counted = here.weights > 0
        true, scored = here.targets[counted], scores[counted]
        nats += F.cross_entropy(scored, true, reduction="sum").double()
        confusion.view(-1).index_add_(0, true * count + scored.argmax(-1), torch.ones_like(true, dtype=torch.float64))
        report(number, batches.per_epoch)
    sums = trained.processes.sum(torch.cat([confusion.flatten(), nats[None]]))
    confusion, total = sums[:-1].view(count, count), float(sums[:-1].sum())
    return {
        "accuracy": float(confusion.diagonal().sum()) / total,
        "macro_f1": macro_f1(confusion),
        "loss": float(sums[-1]) / total,
        "texts": len(texts.store),
        "labels": int(total),
    }


def macro_f1(confusion: Tensor) -> float:
    """The mean of the labels' F1 by counts of true labels (rows) and predicted ones; of those that occur in either.

    >>> macro_f1(torch.tensor([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0]]))
    0.75
    """
    found = confusion.sum(0) + confusion.sum(1)
    each = 2 * confusion.diagonal() / found
    return float(each[found > 0].mean())
