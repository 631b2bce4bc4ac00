"""Preference: replies that are preferred, more likely than those that are rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasor.data.batch import Batch
from phasor.data.store import Progress
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.training.datasets import Datasets
from phasor.training.objectives.base import Objective, Start
from phasor.training.objectives.preference_losses import LOSSES
from phasor.training.objectives.reference import attach_reference
from phasor.training.objectives.replies import sample_replies
from phasor.training.objectives.reply_log_probs import reply_log_probs
from phasor.training.run import RunFolder
from phasor.transformer import Transformer

if TYPE_CHECKING:
    from phasor.training.trainer import Trainer


class Preference(Objective):
    """`task: preference`: a decoder learns from pairs of replies; DPO and its relatives.

    The reward of a reply is `beta` times its log-probability less that of the reference; a pair is told right where the
    preferred reply has the greater one.
    """

    shapes = ("decoder",)
    metrics = ("reward_margin", "reward_accuracy")

    def prepare(
        self, trainer: Trainer, datasets: Datasets, run: RunFolder, progress: Progress, start: Start | None
    ) -> None:
        if self.recipe.preference.needs_reference:
            attach_reference(trainer, datasets, run, progress, start)

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        config = self.recipe.preference
        scores, lengths = reply_log_probs(model, batch, call.record)
        if config.needs_reference:
            assert batch.reference is not None
            scores = scores - batch.reference
        if config.averages:
            scores = scores / lengths.clamp(min=1)
        real = batch.weights > 0
        chosen, rejected = (torch.where(real, side, -1.0) for side in (scores[:, 0::2], scores[:, 1::2]))
        losses, margins = LOSSES[config.loss](config, chosen, rejected), config.beta * (chosen - rejected)
        count = batch.weights.sum().clamp(min=1)
        values = torch.stack((losses, margins, (margins > 0).float()))
        means = torch.where(real, values * batch.weights, 0.0).sum((1, 2)) / count
        self.measured = means[1:].detach()
        return means[0]

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """Replies to the prompts of a few validation pairs."""
        batch = datasets.valid[0]
        assert batch.trained is not None
        return sample_replies(model, datasets, batch, batch.trained, self.recipe.data.sequence_length)
