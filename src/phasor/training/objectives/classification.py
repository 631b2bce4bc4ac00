"""Classification: a label for each text, or for each word."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from phasor.config import ClassifierConfig, HeadConfig, ModelConfig
from phasor.data.batch import Batch
from phasor.models import families
from phasor.nn.norm import at_least_float32
from phasor.nn.record import Record
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.training.objectives.base import Objective
from phasor.training.objectives.pooled import text_args
from phasor.transformer import Transformer

PLACEHOLDERS = ("LABEL_0", "LABEL_1")  # until the data are read
POOLERS = {"encoder": "first", "decoder": "last", "encoder-decoder": "last-dense"}


class Classification(Objective):
    """`task: classify`: the cross-entropy of labels by a classifier's scores.

    An encoder-decoder reads a text with both of its sides, and its decoder's last token has the scores.
    """

    shapes = ("encoder", "decoder", "encoder-decoder")
    varied_batches = True

    def head(self, given: ModelConfig | None, labels: tuple[str, ...] = ()) -> dict[str, Any]:
        return self.fields("encoder" if given is None else given.shape, labels)

    def fields(self, shape: str, labels: tuple[str, ...]) -> dict[str, Any]:
        """A new head: scores of the labels, of texts by the pooled vector of the first token or the last."""
        kind = self.recipe.classify.head
        pooler = {"pooler": POOLERS[shape]} if self.recipe.classify.of == "sequence" else {}
        return {"kind": kind, "labels": labels or self.recipe.classify.labels or PLACEHOLDERS, **pooler}

    def with_head(self, config: ModelConfig, labels: tuple[str, ...] = (), family: str | None = None) -> ModelConfig:
        if self.head_why_not(config) is None and labels in ((), getattr(config.head, "labels", None)):
            return config
        fields = self.fields(config.shape, labels)
        known = {} if family is None else families.family(family).classifiers
        if fields["kind"] in known:  # the head that the family's class for this has
            fields |= {name.removeprefix("head."): value for name, value in known[fields["kind"]].parts.items()}
        return config.replace(head=HeadConfig.from_dict(fields))

    def head_why_not(self, config: ModelConfig) -> str | None:
        if config.shape == "encoder-decoder" and self.recipe.classify.of == "token":
            return "classify.of 'token' trains an encoder or a decoder, and this model is both: begin with its encoder"
        if isinstance(config.head, ClassifierConfig) and config.head.kind == self.recipe.classify.head:
            return None
        wanted = self.recipe.classify
        return f"classify.of {wanted.of!r} trains a {wanted.head}, and this model's head is {config.head.kind!r}"

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        scores = at_least_float32(classify(model, batch, call.record))  # [B, T, labels]
        smoothing = self.recipe.train.label_smoothing if call.training else 0.0
        targets = batch.targets.flatten()
        each = F.cross_entropy(scores.flatten(0, 1), targets, reduction="none", label_smoothing=smoothing)
        return (each * batch.weights.flatten()).sum() / batch.weights.sum().clamp(min=1.0)


def classify(model: Transformer, batch: Batch, record: Record | None = None) -> Tensor:
    """Scores of labels, `[B, 1, labels]` of texts or `[B, T, labels]` of their tokens."""
    scores: Tensor = model(batch.tokens, record=record, **text_args(model, batch))
    return scores[:, None] if scores.ndim == 2 else scores
