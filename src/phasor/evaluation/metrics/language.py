"""The metrics of language models, masked or not."""

from __future__ import annotations

import math
from typing import Any

from phasor.data.positions import GivenPositions
from phasor.evaluation.document_batches import DocumentBatches
from phasor.evaluation.metrics.cross_entropy import perplexity, totals
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress


def language_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """Loss, perplexity and bits per byte."""
    store = texts.store
    nats, tokens, _, sizes = document_totals(trained, texts, None, report)
    bits = nats / math.log(2) / store.text_bytes
    return {"perplexity": perplexity(nats / tokens), "loss": nats / tokens, "bits_per_byte": bits, **sizes}


def masked_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """Accuracy and loss over masked tokens."""
    vocab_size = trained.tokenizers.target.get_vocab_size()
    nats, tokens, correct, sizes = document_totals(trained, texts, vocab_size, report)
    return {"masked_accuracy": correct / tokens, "loss": nats / tokens, **sizes}


def document_totals(
    trained: TrainedRun, texts: EncodedTexts, vocab_size: int | None, report: Progress
) -> tuple[float, int, int, dict[str, Any]]:
    """The nats of all documents, their tokens, how many are predicted right, and sizes; masked with a `vocab_size`."""
    recipe, store = trained.recipe, texts.store
    positions = GivenPositions.of(recipe.data, recipe.train.seed, trained.tokenizers.target, training=False)
    batches = DocumentBatches(
        store, recipe.data.sequence_length, recipe.train.batch_tokens, trained.special, vocab_size, positions
    )
    nats, tokens, correct = totals(trained, batches, lambda done: report(done, len(batches)))
    return nats, tokens, correct, {"documents": len(store), "tokens": tokens, "bytes": store.text_bytes}
