"""Distillation: a student that predicts what a teacher predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phasor.checkpoints import load
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.tensors import fingerprint_model
from phasor.config.distill import DistillConfig
from phasor.data.batch import Batch
from phasor.data.store import Progress
from phasor.nn.heads import head_loss
from phasor.nn.norm import at_least_float32
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.training.datasets import Datasets
from phasor.training.objectives.base import Start
from phasor.training.objectives.language import LanguageModeling
from phasor.training.run import RunFolder
from phasor.transformer import Transformer

if TYPE_CHECKING:
    from phasor.training.trainer import Trainer

CHUNK = 1024  # tokens whose logits are held at a time


class Distillation(LanguageModeling):
    """`task: distill`: a decoder predicts each token of a document, and what its teacher predicts there.

    The teacher is in evaluation mode, in its own dtype, and has no gradients. Every process has all of it.
    """

    cuts_tokens = False

    def prepare(
        self, trainer: Trainer, datasets: Datasets, run: RunFolder, progress: Progress, start: Start | None
    ) -> None:
        folder = str(self.recipe.distill.teacher)
        teacher = load(folder, trainer.device)
        if teacher.config.shape != "decoder" or not teacher.config.has_logits:
            raise ValueError(f"the teacher {folder} is not a decoder with logits over a vocabulary")
        if teacher.tokenizer is None or teacher.tokenizer.get_vocab() != datasets.tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer of the teacher {folder} is not that of the data: set data.tokenizer to {folder}"
            )
        for scheme in (teacher.config.input_position, *teacher.config.layer_positions()):
            limit = scheme.max_positions
            if limit is not None and self.recipe.data.sequence_length > limit:
                raise ValueError(
                    f"data.sequence_length is {self.recipe.data.sequence_length}, and the teacher {folder} allows "
                    f"{limit} tokens"
                )
        self.fingerprint = fingerprint_model(resolve_folder(folder))
        self.teacher = teacher.requires_grad_(False)
        self.vocab_size = datasets.tokenizer.get_vocab_size()

    def fixed_fields(self) -> dict[str, Any]:
        return {"teacher": self.fingerprint}

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        config = self.recipe.distill
        hidden = model(*batch.inputs, record=call.record, head=False, **batch.sequence_args)
        with torch.no_grad():
            wanted = self.teacher(*batch.inputs, head=False, **batch.sequence_args)
        assert model.head is not None
        hard = head_loss(
            model.head,
            hidden,
            model.tokens.table,
            batch.targets,
            batch.weights,
            label_smoothing=self.recipe.train.label_smoothing if call.training else 0.0,
            z_loss=self.recipe.train.z_loss if call.training else 0.0,
        ).total
        total = torch.zeros((), device=hidden.device)
        rows = zip(*(x.flatten(0, 1).split(CHUNK) for x in (hidden, wanted, batch.weights)), strict=True)
        for own, theirs, weights in rows:
            total = total + checkpoint(self.divergence, model, own, theirs, weights, use_reentrant=False)
        soft = total / batch.weights.sum().clamp(min=1.0)
        return config.alpha * hard + (1 - config.alpha) * config.temperature**2 * soft

    def divergence(self, model: Transformer, hidden: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """The summed divergence of some tokens, by the hidden states of student and teacher `[N, dim]`."""
        assert model.head is not None
        assert self.teacher.head is not None
        logits = model.head(hidden, model.tokens.table)[:, : self.vocab_size]
        with torch.no_grad():
            target = self.teacher.head(wanted, self.teacher.tokens.table)[:, : self.vocab_size]
        return (divergence(logits, target, self.recipe.distill) * weights).sum()


def divergence(logits: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """`KL(teacher || student)` of each row of logits `[N, V]`, at the temperature, over the teacher's `top_k` tokens.

    >>> rows = torch.tensor([[1.0, 2.0, 3.0]])
    >>> float(divergence(rows, rows, DistillConfig(temperature=2.0)))
    0.0
    """
    student = F.log_softmax(at_least_float32(logits) / config.temperature, dim=-1)
    wanted = at_least_float32(teacher) / config.temperature
    if config.top_k is not None and config.top_k < wanted.shape[-1]:
        wanted, tokens = wanted.topk(config.top_k, dim=-1)
        student = student.gather(-1, tokens)
    log_p = F.log_softmax(wanted, dim=-1)
    return (log_p.exp() * (log_p - student)).sum(-1)
