"""Chat: the replies of conversations."""

from __future__ import annotations

from phasor.training.datasets import Datasets
from phasor.training.objectives.cross_entropy import CrossEntropy
from phasor.training.objectives.replies import sample_replies
from phasor.training.objectives.targets import sample_targets
from phasor.transformer import Transformer


class Chat(CrossEntropy):
    """`task: chat`: each token of the replies of a conversation is predicted from all that is before it.

    A decoder reads conversations whole; an encoder-decoder has the turns before a reply as source.
    """

    shapes = ("decoder", "encoder-decoder")

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """Replies to the prompts of a few validation conversations."""
        if model.encoder is not None:
            return sample_targets(model, datasets)
        batch = datasets.valid[0]
        return sample_replies(model, datasets, batch, batch.weights, self.recipe.data.sequence_length)
