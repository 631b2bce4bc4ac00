"""Translation: the target of a source."""

from __future__ import annotations

from phasor.training.datasets import Datasets
from phasor.training.objectives.cross_entropy import CrossEntropy
from phasor.training.objectives.targets import sample_targets
from phasor.transformer import Transformer


class Translation(CrossEntropy):
    """`task: translation`: an encoder-decoder predicts each token of a target from those before it and the source."""

    shapes = ("encoder-decoder",)

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """A few validation pairs, translated."""
        return sample_targets(model, datasets)
