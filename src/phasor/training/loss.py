"""What training makes small: cross-entropy with its extras, in float32. Many logits are never held at once."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.nn.feed_forward import untouched
from phasor.nn.heads import LogitsHead
from phasor.nn.moe import balancing_loss
from phasor.ops.cross_entropy.cross_entropy import logits_cross_entropy
from phasor.transformer import Record, Transformer

BALANCE = 0.01  # the weight of the routers' balancing loss, that of Switch Transformers (Fedus et al. 2021)


def loss_of(model: Transformer, batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, a mean over the tokens that count, and its parts by name.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> tokens = torch.randint(0, 50, (2, 7))
    >>> batch = Batch(tokens=tokens, targets=tokens, weights=torch.ones(2, 7))
    >>> loss, parts = loss_of(model, batch, Recipe())
    >>> loss.shape, list(parts)
    (torch.Size([]), ['cross_entropy'])
    """
    config: ModelConfig = model.config
    routers = routers_of(config)
    record = Record("router") if routers else None
    loss, parts = cross_entropy(model, batch, recipe.train.label_smoothing, recipe.train.z_loss, record)
    if record is not None:
        sides = [record] if record.encoder is record else [record, record.encoder]
        logits_of = [logits for side in sides for logits in side.router or []]
        balance = balancing_loss(logits_of, routers)
        loss, parts["balance"] = loss + BALANCE * balance, balance.detach()
    return loss, parts


def forward(model: Transformer, batch: Batch, record: Record | None = None, *, head: bool = True) -> Tensor:
    """The logits of a batch, `[B, T, vocab]`, or what the head makes them of."""
    if batch.source is not None:
        return model(batch.source, batch.tokens, attention_mask=batch.source_attention_mask, record=record, head=head)
    return model(batch.tokens, document_ids=batch.document_ids, record=record, head=head)


def cross_entropy(
    model: Transformer, batch: Batch, smoothing: float = 0.0, z_loss: float = 0.0, record: Record | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of `-log p(target)` over the tokens that count, with the z-loss where there is one, and its parts.

    `smoothing` spreads that share of the target evenly over the vocabulary. Where no token counts, all is 0.
    """
    head = model.head
    if head is None or not model.config.has_logits:
        raise ValueError(f"a loss needs logits, and this model's head is {model.config.head.kind!r}")
    hidden, table = forward(model, batch, record, head=False), model.tokens.table
    if type(head) is LogitsHead and untouched(head):
        sums = head.cross_entropy(hidden, table, batch.targets, batch.weights, smoothing, z_loss)
    else:  # whatever stands in its place, called as it is
        logits = head(hidden, table).flatten(0, -2)
        sums = logits_cross_entropy(logits, batch.targets.flatten(), batch.weights.flatten(), smoothing, z_loss)
    total = batch.weights.sum()
    count = torch.where(total > 0, total, 1.0)
    parts = {"cross_entropy": sums.cross_entropy / count}
    if z_loss:
        parts["z_loss"] = sums.z / count
    return sums.loss / count, parts


def routers_of(config: ModelConfig) -> int:
    """How many experts a token takes, or 0 in a model without any."""
    experts = [config.layer(i).feedforward.experts for i in range(config.num_layers)]
    return max((each.top_k for each in experts if each is not None), default=0)
