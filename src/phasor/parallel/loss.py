"""A process's part of the loss: the parts of all processes add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config.model import Side
from phasor.data.batch import Batch, pad_rows
from phasor.nn.heads import BALANCE_WEIGHT, experts_per_token, head_loss
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
    sides: list[Side] = [side for side in ("decoder", "encoder") if getattr(model, side) is not None]
    top_k = [k for side in sides for k in experts_per_token(model.config, side)] if balance_weight else []
    record = Record("router") if top_k else None
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
    records = [record] if record.encoder is record else [record, record.encoder]
    rows = [batch.tokens] if batch.source is None else [batch.tokens, batch.source]
    counted = [counted_tokens(each, batch.repeated, share) for each in rows]
    logits = [(share.slice(x), y) for each, y in zip(records, counted, strict=True) for x in each.router or []]
    return loss + balance_weight * balance_share * local_balance(logits, top_k, sum_over)


def counted_tokens(rows: Tensor, repeated: int, share: TokenShare) -> Tensor:
    """1.0 for the tokens of a process that are part of a batch, and not only repeated or padded; `[B, T]`."""
    counted = torch.ones(rows.shape, device=rows.device)
    counted[len(rows) - repeated :] = 0.0
    return share.take(pad_rows(counted, -rows.shape[1] % share.multiple))


def local_balance(
    routers: Sequence[tuple[Tensor, Tensor]], top_k: Sequence[int], sum_over: Callable[[Tensor], Tensor]
) -> Tensor:
    """A process's part of `balancing_loss` over the tokens of all: the shares of experts are those of all tokens.

    Routers are given by their logits `[B, T, experts]` and how much each token counts, `[B, T]`.

    >>> float(local_balance([(torch.zeros(1, 8, 4), torch.ones(1, 8))], [4], lambda tensor: tensor))
    4.0
    """
    total = torch.zeros((), device=routers[0][0].device)
    for (logits, counted), k in zip(routers, top_k, strict=True):
        probabilities = logits.float().softmax(-1)
        chosen = F.one_hot(probabilities.topk(k, dim=-1).indices, logits.shape[-1]).sum(-2) * counted[..., None]
        sums = sum_over(torch.cat((chosen.flatten(0, -2).sum(0), counted.sum()[None])))
        share, tokens = sums[:-1] / sums[-1], sums[-1]
        mine = (probabilities * counted[..., None]).flatten(0, -2).sum(0)
        total = total + logits.shape[-1] * (share * mine / tokens).sum()
    return total / len(routers)
