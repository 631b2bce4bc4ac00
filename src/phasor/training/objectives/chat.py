"""Chat: the replies of conversations."""

from __future__ import annotations

from phasor.training.datasets import Datasets
from phasor.training.objectives.cross_entropy import CrossEntropy
from phasor.training.objectives.replies import sample_replies
from phasor.transformer import Transformer


class Chat(CrossEntropy):
    """`task: chat`: a decoder predicts each token of the replies of a conversation from all that is before it."""

    shapes = ("decoder",)

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """Replies to the prompts of a few validation conversations."""
        batch = datasets.valid[0]
        return sample_replies(model, datasets, batch, batch.weights, self.recipe.data.sequence_length)
