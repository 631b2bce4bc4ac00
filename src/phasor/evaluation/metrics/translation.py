"""The metrics of models that translate."""

from __future__ import annotations

from typing import Any

from phasor.data.batches import Batches
from phasor.evaluation.metrics.cross_entropy import perplexity, totals
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.evaluation.scores import scores
from phasor.generation.translation import Progress, max_positions, translate_tokens


def translation_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """The metrics of a model that translates."""
    model, store = trained.model, texts.store
    references = [target for _, target in texts.examples]
    assert model.decoder is not None
    limit = max_positions(model.decoder)
    for number, length in enumerate((store.lengths[:, 1] - 1).tolist(), 1):
        if limit is not None and length > limit:
            raise ValueError(f"the target {number} has {length} tokens, and this model allows {limit}")
    sources = [store[i][0].tolist() for i in range(len(store))]
    batches = Batches(store, trained.recipe, special=trained.special, shuffled=False)
    work = len(store) + batches.per_epoch
    new = translate_tokens(model, sources, num_beams=num_beams, progress=lambda done, _: report(done, work))
    quality = scores(trained.tokenizers.target.decode_batch(new), references)
    nats, tokens, _ = totals(
        trained, batches.stream(0, batches.per_epoch), lambda done: report(len(store) + done, work)
    )
    sizes = {"sentences": len(store), "tokens": tokens}
    return {**quality, "perplexity": perplexity(nats / tokens), "loss": nats / tokens, **sizes}
