"""The cross-entropy of tokens, which language models, masked or not, and translation minimize."""

from __future__ import annotations

from torch import Tensor

from phasor.data.batch import Batch
from phasor.nn.heads import head_loss
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.training.objectives.base import Objective
from phasor.transformer import Transformer


class CrossEntropy(Objective):
    """The mean of `-log p(target)` over the tokens that count, with label smoothing and the z-loss of the recipe."""

    cuts_tokens = True

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        hidden = model(*batch.inputs, record=call.record, head=False, **batch.sequence_args)
        assert model.head is not None
        return head_loss(
            model.head,
            hidden,
            model.tokens.table,
            call.share.take(batch.targets),
            call.share.take(batch.weights),
            label_smoothing=self.recipe.train.label_smoothing if call.training else 0.0,
            z_loss=self.recipe.train.z_loss if call.training else 0.0,
        ).total
