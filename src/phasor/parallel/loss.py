"""A process's part of the loss: the parts of all processes add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phasor.data.batch import Batch, pad_rows
from phasor.nn.heads import BALANCE_WEIGHT, head_loss
from phasor.nn.moe import balance_of, mixtures_of, routed_tokens
from phasor.nn.record import Record
from phasor.parallel.cuts import Place
from phasor.parallel.tokens import TokenShare
from phasor.transformer import Transformer

ALL_TOKENS = TokenShare(Place())


def local_loss(
    model: Transformer,
    batch: Batch,
    count: float,
    balance_share: float,
    sum_over: Callable[[Tensor], Tensor],
    share: TokenShare = ALL_TOKENS,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance_weight: float = BALANCE_WEIGHT,
) -> Tensor:
    """The part of a share of a batch in a mean over `count` tokens; `sum_over` sums a tensor over all processes.

    The model is given whole rows, and computes the tokens of `share`. `balance_share` is how much the balancing loss of
    the whole batch counts: 1, or less where gradients of several batches are accumulated.
    """
    record = Record("router") if balance_weight and mixtures_of(model) else None
    padded = batch.pad_to_multiple(share.multiple)
    hidden = model(*padded.inputs, record=record, head=False, **padded.sequence_args)
    assert model.head is not None
    targets, weights = share.take(padded.targets), share.take(padded.weights)
    mean = head_loss(
        model.head, hidden, model.tokens.table, targets, weights, label_smoothing=label_smoothing, z_loss=z_loss
    )
    loss = mean.total * (weights.sum() / max(count, 1.0))
    if record is None:
        return loss
    rows = [batch.tokens] if batch.source is None else [batch.tokens, batch.source]
    counted = [counted_tokens(each, batch.repeated, share) for each in rows]
    routed = [
        each._replace(logits=share.slice(each.logits), counted=of_side)
        for side, of_side in zip(routed_tokens(model, record), counted, strict=True)
        for each in side
    ]
    return loss + balance_weight * balance_share * balance_of(routed, sum_over)


def counted_tokens(rows: Tensor, repeated: int, share: TokenShare) -> Tensor:
    """1.0 for the tokens of a process that are part of a batch, and not only repeated or padded; `[B, T]`."""
    counted = torch.ones(rows.shape, device=rows.device)
    counted[len(rows) - repeated :] = 0.0
    return share.take(pad_rows(counted, -rows.shape[1] % share.multiple))
