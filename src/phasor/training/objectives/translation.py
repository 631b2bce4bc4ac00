"""Translation: the target of a source."""

from __future__ import annotations

from phasor.generation.translation import translate_tokens
from phasor.training.datasets import Datasets
from phasor.training.objectives.cross_entropy import CrossEntropy
from phasor.transformer import Transformer

SENTENCES = 4  # of a sample


class Translation(CrossEntropy):
    """`task: translation`: an encoder-decoder predicts each token of a target from those before it and the source."""

    shapes = ("encoder-decoder",)
    varied_batches = True

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """A few validation pairs, translated."""
        tokenizer = datasets.tokenizer
        if tokenizer is None:
            return None
        batch = datasets.valid[0]
        assert batch.source is not None
        assert batch.source_attention_mask is not None
        rows = list(zip(batch.source, batch.source_attention_mask, strict=True))[:SENTENCES]
        sources = [row[real].tolist() for row, real in rows]
        read = (datasets.source_tokenizer or tokenizer).decode_batch(sources)
        written = tokenizer.decode_batch(translate_tokens(model, sources, num_beams=1))
        return "\n".join("\t".join(pair) for pair in zip(read, written, strict=True))
