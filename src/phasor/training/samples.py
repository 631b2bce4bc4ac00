"""A sample of what a model has learned: a text it continues, or sentences it translates."""

from __future__ import annotations

from phasor.config.recipe import Recipe
from phasor.generation import generate
from phasor.generation.translation import translate_tokens
from phasor.training.datasets import Datasets
from phasor.transformer import Transformer

TOKENS, SENTENCES = 128, 4


def sample_text(model: Transformer, recipe: Recipe, datasets: Datasets) -> str | None:
    """Text from the beginning for a language model, a few validation pairs translated, nothing for an encoder.

    Nothing either for coupled positions, which follow from a text and not from its beginning.
    """
    tokenizer = datasets.tokenizer
    if recipe.task == "mlm" or recipe.data.positions == "coupled" or tokenizer is None:
        return None
    if recipe.task == "lm":
        bos = model.special.bos
        room = [p.max_positions for p in (model.config.input_position, *model.config.layer_positions())]
        limit = min([TOKENS, recipe.data.sequence_length, *(n for n in room if n is not None)]) - 1
        new = generate(model, [0 if bos is None else bos], max_new_tokens=max(1, limit), temperature=0.8, seed=0)
        return tokenizer.decode(new)
    batch = datasets.valid[0]
    assert batch.source is not None
    assert batch.source_attention_mask is not None
    rows = list(zip(batch.source, batch.source_attention_mask, strict=True))[:SENTENCES]
    sources = [row[real].tolist() for row, real in rows]
    reader = datasets.source_tokenizer or tokenizer
    pairs = zip(
        reader.decode_batch(sources), tokenizer.decode_batch(translate_tokens(model, sources, num_beams=1)), strict=True
    )
    return "\n".join("\t".join(pair) for pair in pairs)
