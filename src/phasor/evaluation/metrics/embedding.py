"""The metrics of models that embed texts."""

from __future__ import annotations

from typing import Any

import torch

from phasor.data.batches import Batches
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress
from phasor.training.objectives.pooled import embed_batch

DEEPEST = 10  # the last rank that counts
ROWS = 1024  # anchors that are compared at a time


def embedding_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """How often an anchor's own positive is the most similar of all texts, and its mean reciprocal rank.

    The texts are all positives and negatives; those that stand there twice count once.
    """
    batches = Batches(texts.store, trained.recipe, special=trained.special, shuffled=False)
    anchors, candidates, keys, own = [], [], [], []
    for number, batch in enumerate(batches.stream(0, batches.per_epoch), 1):
        here = batch.to(trained.device)
        assert here.candidate_mask is not None
        assert batch.candidates is not None
        assert batch.candidate_mask is not None
        vectors, others = embed_batch(trained.model, here)
        anchors.append(vectors)
        candidates.append(others[here.candidate_mask.any(-1)])
        for row, mask in zip(batch.candidates, batch.candidate_mask, strict=True):
            texts_of_row = [tuple(text[real].tolist()) for text, real in zip(row, mask, strict=True) if real.any()]
            own.append(texts_of_row[0])
            keys += texts_of_row
        report(number, batches.per_epoch)
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    table = torch.cat(candidates)[[first[key] for key in places]]
    wanted = torch.tensor([places[key] for key in own], device=table.device)
    ranks = torch.cat([
        1 + (scores > scores.gather(1, true[:, None])).sum(1)
        for rows, true in zip(torch.cat(anchors).split(ROWS), wanted.split(ROWS), strict=True)
        for scores in (rows @ table.T,)
    ]).double()  # fmt: skip
    return {
        "accuracy": float((ranks == 1).double().mean()),
        f"mrr_at_{DEEPEST}": float(torch.where(ranks <= DEEPEST, 1 / ranks, 0.0).mean()),
        "anchors": len(own),
        "texts": len(places),
    }
