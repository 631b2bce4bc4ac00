"""Language modeling: the next token of a text."""

from __future__ import annotations

from phasor.generation import generate
from phasor.training.datasets import Datasets
from phasor.training.objectives.cross_entropy import CrossEntropy
from phasor.transformer import Transformer

TOKENS = 128  # of a sample


class LanguageModeling(CrossEntropy):
    """`task: lm`: a decoder predicts each token of a document from those before it."""

    shapes = ("decoder",)

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """A text from its beginning; nothing for coupled positions, which follow from a text."""
        if datasets.tokenizer is None or self.recipe.data.positions == "coupled":
            return None
        bos = model.special.bos
        room = [p.max_positions for p in (model.config.input_position, *model.config.layer_positions())]
        limit = min([TOKENS, self.recipe.data.sequence_length, *(n for n in room if n is not None)]) - 1
        new = generate(model, [0 if bos is None else bos], max_new_tokens=max(1, limit), temperature=0.8, seed=0)
        return str(datasets.tokenizer.decode(new))
