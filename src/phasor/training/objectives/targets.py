"""Targets that show what an encoder-decoder has learned."""

from __future__ import annotations

from phasor.generation.translation import translate_tokens
from phasor.training.datasets import Datasets
from phasor.transformer import Transformer

SOURCES = 4


def sample_targets(model: Transformer, datasets: Datasets) -> str | None:
    """The first sources to validate with, each with what the model writes greedily for it."""
    tokenizer = datasets.tokenizer
    if tokenizer is None:
        return None
    batch = datasets.valid[0]
    assert batch.source is not None
    assert batch.source_attention_mask is not None
    rows = list(zip(batch.source, batch.source_attention_mask, strict=True))[:SOURCES]
    sources = [row[real].tolist() for row, real in rows]
    read = (datasets.source_tokenizer or tokenizer).decode_batch(sources)
    written = tokenizer.decode_batch(translate_tokens(model, sources, num_beams=1))
    return "\n".join("\t".join(pair) for pair in zip(read, written, strict=True))
