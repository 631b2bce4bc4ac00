"""Embeddings: a vector for each text, near those of texts that belong to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config import HeadConfig, ModelConfig, PooledHeadConfig
from phasor.data.batch import Batch
from phasor.parallel.exchange import gather_tokens
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.training.objectives.base import Objective
from phasor.training.objectives.pooled import embed_batch
from phasor.transformer import Transformer

POOLERS = {"encoder": "mean", "decoder": "last"}


class ContrastiveEmbedding(Objective):
    """`task: embed`: each anchor's positive among all candidates of the batch, by scaled cosine similarities.

    That is the InfoNCE loss (van den Oord et al. 2018), which sentence-transformers calls
    MultipleNegativesRankingLoss. Several processes exchange their candidates, so that the loss is that of one.
    """

    shapes = ("encoder", "decoder")
    varied_batches = True
    reads_other_rows = True

    def head(self, given: ModelConfig | None, labels: tuple[str, ...] = ()) -> dict[str, Any]:
        if given is not None and isinstance(given.head, PooledHeadConfig):
            return {}
        return {"kind": "pooled", "pooler": POOLERS["encoder" if given is None else given.shape]}

    def with_head(self, config: ModelConfig, labels: tuple[str, ...] = (), family: str | None = None) -> ModelConfig:
        head = self.head(config)
        return config.replace(head=HeadConfig.from_dict(head)) if head else config

    def head_why_not(self, config: ModelConfig) -> str | None:
        if isinstance(config.head, PooledHeadConfig):
            return None
        return f"the task 'embed' trains a pooled head, and this model's is {config.head.kind!r}"

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        anchors, candidates = embed_batch(model, batch, call.record)
        assert batch.candidate_mask is not None
        real = batch.candidate_mask.any(-1) & (batch.weights > 0)  # [B, K]
        everyone, before = self.of_all_processes(candidates.flatten(0, 1))  # [P B K, features]
        of_everyone, _ = self.of_all_processes(real.flatten().to(everyone.dtype))
        scores = self.recipe.embed.scale * anchors @ everyone.T  # [B, P B K]
        scores = scores.masked_fill(of_everyone == 0, -torch.inf)
        own = before + torch.arange(len(anchors), device=scores.device) * real.shape[1]
        each = F.cross_entropy(scores, own, reduction="none")
        weights = batch.weights[:, 0]
        return torch.where(weights > 0, each * weights, 0.0).sum() / weights.sum().clamp(min=1.0)

    def of_all_processes(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all processes that share a batch, and how many of them stand before those of this one."""
        before, count = 0, len(rows)
        for axis in self.row_axes:
            rows = gather_tokens(rows[None], axis)[0]
            before, count = before + axis.index * count, count * axis.size
        return rows, before
