"""A process's part of the loss: the parts of all processes add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config.model import Side
from phasor.data.batch import Batch
from phasor.nn.heads import BALANCE_WEIGHT, experts_per_token, head_loss
from phasor.nn.record import Record
from phasor.transformer import Transformer


def local_loss(
    model: Transformer,
    batch: Batch,
    count: float,
    balance_share: float,
    sum_over: Callable[[Tensor], Tensor],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance_weight: float = BALANCE_WEIGHT,
) -> Tensor:
    """The part of a share of a batch in a mean over `count` tokens; `sum_over` sums a tensor over all processes.

    `balance_share` is how much the balancing loss of the whole batch counts: 1, or less where gradients of several
    batches are accumulated.
    """
    sides: list[Side] = [side for side in ("decoder", "encoder") if getattr(model, side) is not None]
    top_k = [k for side in sides for k in experts_per_token(model.config, side)] if balance_weight else []
    record = Record("router") if top_k else None
    hidden = model(*batch.inputs, record=record, head=False, **batch.sequence_args)
    assert model.head is not None
    mean = head_loss(
        model.head,
        hidden,
        model.tokens.table,
        batch.targets,
        batch.weights,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    loss = mean.total * (batch.weights.sum() / max(count, 1.0))
    if record is None:
        return loss
    records = [record] if record.encoder is record else [record, record.encoder]
    logits = [layer for each in records for layer in each.router or []]
    rows = len(batch.tokens) - batch.repeated
    return loss + balance_weight * balance_share * local_balance([x[:rows] for x in logits], top_k, sum_over)


def local_balance(
    router_logits: Sequence[Tensor], top_k: Sequence[int], sum_over: Callable[[Tensor], Tensor]
) -> Tensor:
    """A process's part of `balancing_loss` over the tokens of all: the shares of experts are those of all tokens.

    >>> float(local_balance([torch.zeros(1, 8, 4)], [4], lambda tensor: tensor))
    4.0
    """
    total = torch.zeros((), device=router_logits[0].device)
    for logits, k in zip(router_logits, top_k, strict=True):
        probabilities = logits.float().softmax(-1).flatten(0, -2)
        chosen = F.one_hot(probabilities.topk(k, dim=-1).indices, logits.shape[-1]).sum(-2).float().sum(0)
        sums = sum_over(torch.cat((chosen, chosen.new_full((1,), float(len(probabilities))))))
        share, tokens = sums[:-1] / sums[-1], sums[-1]
        total = total + logits.shape[-1] * (share * probabilities.sum(0) / tokens).sum()
    return total / len(router_logits)
