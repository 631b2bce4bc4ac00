"""A process's part of the loss: the parts of all processes add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.data.batch import Batch, pad_rows
from phasor.nn.heads import BALANCE_WEIGHT
from phasor.nn.moe import balance_of, mixtures_of, routed_tokens
from phasor.nn.record import Record
from phasor.parallel.tokens import ALL_TOKENS, TokenShare
from phasor.transformer import Transformer


class LossCall(NamedTuple):
    """What besides model and batch a loss is asked with.

    `record` is for the model's forward, `share` the tokens that count, and without `training` nothing regularizes.
    """

    record: Record | None = None
    share: TokenShare = ALL_TOKENS
    training: bool = True


PLAIN_LOSS = LossCall()


def local_loss(
    mean_loss: Callable[[Transformer, Batch, LossCall], Tensor],
    model: Transformer,
    batch: Batch,
    count: float,
    balance_share: float,
    sum_over: Callable[[Tensor], Tensor],
    share: TokenShare = ALL_TOKENS,
    *,
    training: bool = True,
) -> Tensor:
    """The part of a share of a batch in a mean over `count` tokens; `sum_over` sums a tensor over all processes.

    The model is given whole rows, and computes the tokens of `share`. `balance_share` is how much the balancing loss of
    the whole batch counts: 1, or less where gradients of several batches are accumulated; it is for training alone.
    """
    record = Record("router") if training and mixtures_of(model) else None
    padded = batch.pad_to_multiple(share.multiple)
    mean = mean_loss(model, padded, LossCall(record, share, training))
    loss = mean * (share.take(padded.weights).sum() / max(count, 1.0))
    if record is None:
        return loss
    rows = [batch.tokens] if batch.source is None else [batch.tokens, batch.source]
    counted = [counted_tokens(each, batch.repeated, share) for each in rows]
    routed = [
        each._replace(logits=share.slice(each.logits), counted=of_side)
        for side, of_side in zip(routed_tokens(model, record), counted, strict=True)
        for each in side
    ]
    return loss + BALANCE_WEIGHT * balance_share * balance_of(routed, sum_over)


def counted_tokens(rows: Tensor, repeated: int, share: TokenShare) -> Tensor:
    """1.0 for the tokens of a process that are part of a batch, and not only repeated or padded; `[B, T]`."""
    counted = torch.ones(rows.shape, device=rows.device)
    counted[len(rows) - repeated :] = 0.0
    return share.take(pad_rows(counted, -rows.shape[1] % share.multiple))
