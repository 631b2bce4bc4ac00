"""The cross-entropy of tokens, which language models, masked or not, and translation minimize."""

from __future__ import annotations

from torch import Tensor

from phasor.data.batch import Batch
from phasor.nn.heads import head_loss
from phasor.nn.record import Record
from phasor.parallel.tokens import ALL_TOKENS, TokenShare
from phasor.training.objectives.base import Objective
from phasor.transformer import Transformer


class CrossEntropy(Objective):
    """The mean of `-log p(target)` over the tokens that count, with label smoothing and the z-loss of the recipe."""

    cuts_tokens = True

    def mean_loss(
        self,
        model: Transformer,
        batch: Batch,
        record: Record | None = None,
        share: TokenShare = ALL_TOKENS,
        *,
        training: bool = True,
    ) -> Tensor:
        hidden = model(*batch.inputs, record=record, head=False, **batch.sequence_args)
        assert model.head is not None
        return head_loss(
            model.head,
            hidden,
            model.tokens.table,
            share.take(batch.targets),
            share.take(batch.weights),
            label_smoothing=self.recipe.train.label_smoothing if training else 0.0,
            z_loss=self.recipe.train.z_loss if training else 0.0,
        ).total
