"""What training makes small: cross-entropy with its extras, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.model import Record, Transformer
from phasor.parts.experts import balancing_loss
from phasor.parts.norm import at_least_float32

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
    logits = forward(model, batch, record)
    mean = cross_entropy(logits, batch.targets, batch.weights, recipe.train.smoothing)
    loss, parts = mean, {"cross_entropy": mean.detach()}
    if recipe.train.z_loss:
        z = weighted_mean(at_least_float32(logits).logsumexp(-1) ** 2, batch.weights)
        loss, parts["z_loss"] = loss + recipe.train.z_loss * z, z.detach()
    if record is not None:
        sides = [record] if record.encoder is record else [record, record.encoder]
        logits_of = [logits for side in sides for logits in side.router or []]
        balance = balancing_loss(logits_of, routers)
        loss, parts["balance"] = loss + BALANCE * balance, balance.detach()
    return loss, parts


def forward(model: Transformer, batch: Batch, record: Record | None = None) -> Tensor:
    """The logits of a batch, `[B, T, vocab]`."""
    if batch.source is not None:
        return model(batch.source, batch.tokens, padding=batch.source_padding, record=record)
    return model(batch.tokens, documents=batch.documents, record=record)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean of `-log p(target)`; `smoothing` spreads that share of the target evenly over the vocabulary.

    >>> float(cross_entropy(torch.zeros(1, 3, 8), torch.zeros(1, 3).long(), torch.ones(1, 3)))
    2.0794415...
    """
    each = F.cross_entropy(
        at_least_float32(logits).flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return weighted_mean(each.view(targets.shape), weights)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The mean over the tokens that count; 0 where none does."""
    total = weights.sum()
    # Not a product with the weights alone: 0 times a padding token's infinity is not a number.
    counted = torch.where(weights > 0, values * weights, 0.0)
    return counted.sum() / torch.where(total > 0, total, 1.0)


def routers_of(config: ModelConfig) -> int:
    """How many experts a token takes, or 0 in a model without any."""
    experts = [config.layer(i).feedforward.experts for i in range(config.num_layers)]
    return max((each.top_k for each in experts if each is not None), default=0)
