"""The metrics of models that reply."""

from __future__ import annotations

from typing import Any

from phasor.data.batches import Batches
from phasor.evaluation.metrics.cross_entropy import perplexity, totals
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress


def chat_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """Loss, perplexity and accuracy of the tokens of replies."""
    shape = trained.model.config.shape
    batches = Batches(texts.store, trained.recipe, special=trained.special, shuffled=False, shape=shape)
    count = batches.per_epoch
    nats, tokens, correct = totals(trained, batches.stream(0, count), lambda done: report(done, count))
    sizes = {"replies" if shape == "encoder-decoder" else "conversations": len(texts.store), "tokens": tokens}
    return {"perplexity": perplexity(nats / tokens), "loss": nats / tokens, "accuracy": correct / tokens, **sizes}
