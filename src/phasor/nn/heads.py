"""The model's last layer: logits over the vocabulary and their loss, scores of labels, hidden states, or one vector."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import (
    ClassifierConfig,
    DenseConfig,
    LogitsConfig,
    MaskedHeadConfig,
    ModelConfig,
    NoHeadConfig,
    PooledHeadConfig,
)
from phasor.nn.feed_forward import ACTIVATIONS_BY_NAME, activate
from phasor.nn.hooks import calls_own_forward
from phasor.nn.moe import RoutedTokens, balance_of
from phasor.nn.norm import at_least_float32, build_norm
from phasor.ops.cross_entropy import (
    LossSums,
    linear_cross_entropy,
    logits_cross_entropy,
    scale_and_softcap,
)
from phasor.ops.quantized import Matrix, dequantize, quantized_linear

DENSE_ACTIVATIONS = ACTIVATIONS_BY_NAME | {"identity": nn.Identity(), "tanh": torch.tanh}
BALANCE_WEIGHT = 0.01  # of the routers' balancing loss, as in Switch Transformers (Fedus et al. 2021)


class Loss(NamedTuple):
    """A mean over the tokens that count, and its terms, which are detached.

    `total = cross_entropy + z_loss * z + balance_weight * balance`, and gradients flow through it. `z` is None without
    a `z_loss`, and `balance` in a model without routed experts.
    """

    total: Tensor
    cross_entropy: Tensor
    z: Tensor | None = None
    balance: Tensor | None = None

    def add_balance(self, routed: list[RoutedTokens], weight: float) -> Loss:
        """The same with the routers' balancing loss added."""
        balance = balance_of(routed)
        return self._replace(total=self.total + weight * balance, balance=balance.detach())


class LogitsHead(nn.Module):
    """`softcap(multiplier * (h W^T + b))`, W the token table where the two are tied.

    A masked-language-model head first passes `h` through a dense layer, an activation and a norm; where the whole
    first layer has the table's own width, it is the dense layer that leads back to it.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert isinstance(model.head, LogitsConfig)
        config, width = model.head, model.embedding.width or model.dim
        self.softcap = config.softcap
        self.multiplier = model.dim**-0.5 if config.multiplier == "rsqrt" else config.multiplier
        masked = config if isinstance(config, MaskedHeadConfig) else None
        self.activation = None if masked is None else masked.activation
        self.dense = nn.Linear(model.dim, model.input_width, bias=masked.dense_bias) if masked else None
        self.norm = build_norm(model.norm, model.input_width) if masked else None
        self.project = nn.Linear(model.dim, width, bias=False) if config.projects(model.embedding) else None
        tied = model.embedding.tied
        self.weight: Tensor | None = None if tied else nn.Parameter(torch.empty(model.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(model.vocab_size)) if config.bias else None

    def forward(self, h: Tensor, tokens: Matrix) -> Tensor:
        logits = quantized_linear(self.features(h), self.table(tokens), self.bias)
        return scale_and_softcap(logits, self.multiplier, self.softcap)

    def table(self, tokens: Matrix) -> Matrix:
        """W: the token table, or one of the head's own."""
        return tokens if self.weight is None else self.weight

    def features(self, h: Tensor) -> Tensor:
        """What the table is multiplied with."""
        if self.dense is not None and self.norm is not None and self.activation is not None:
            h = self.norm(activate(self.dense(h), self.activation))
        return h if self.project is None else self.project(h)

    def cross_entropy(
        self,
        h: Tensor,
        tokens: Matrix,
        targets: Tensor,
        weights: Tensor,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> LossSums:
        """The summed cross-entropy of targets `[B, T]` by hidden states `[B, T, dim]`; not all logits are held at once.

        >>> head = LogitsHead(ModelConfig(vocab_size=9, dim=4, num_layers=1, num_heads=1))
        >>> targets = torch.tensor([[1, 8, 0]])
        >>> sums = head.cross_entropy(torch.zeros(1, 3, 4), torch.randn(9, 4), targets, torch.ones(1, 3))
        >>> round(float(sums.cross_entropy) / 3, 4)  # the log of 9
        2.1972
        """
        table = self.table(tokens)
        return linear_cross_entropy(
            self.features(h).flatten(0, -2),
            table if isinstance(table, Tensor) else dequantize(table, h.dtype),
            targets.flatten(),
            weights.flatten(),
            bias=self.bias,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            multiplier=self.multiplier,
            softcap=self.softcap,
        )


class ProjectedHead(nn.Module):
    """Hidden states brought to the token table's own width."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.project = nn.Linear(model.dim, model.embedding.width or model.dim, bias=False)

    def forward(self, h: Tensor, tokens: Matrix) -> Tensor:
        return self.project(h)


class ClassifierHead(nn.Module):
    """A score for each label: `h W^T + b`, of `norm(activation(dense(h)))` where the head has a dense layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert isinstance(model.head, ClassifierConfig)
        config = model.head
        self.activation = config.dense
        self.dense = None if config.dense is None else nn.Linear(model.dim, model.dim, bias=config.dense_bias)
        self.norm = build_norm(model.norm, model.dim) if config.dense_norm else nn.Identity()
        self.score = nn.Linear(model.dim, len(config.labels), bias=config.score_bias)

    def forward(self, h: Tensor, tokens: Matrix) -> Tensor:
        if self.dense is not None and self.activation is not None:
            h = self.norm(activate(self.dense(h), self.activation))
        return self.score(h)


def head_loss(
    head: nn.Module,
    hidden: Tensor,
    tokens: Matrix,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Loss:
    """The mean of `-log p(target)` over the tokens that count, by hidden states `[B, T, dim]`, in at least float32.

    `weights [B, T]` says how much each token counts, by default 1; where none counts, the loss is 0.
    `label_smoothing` spreads that share of the target evenly over the vocabulary.

    >>> head = LogitsHead(ModelConfig(vocab_size=9, dim=4, num_layers=1, num_heads=1))
    >>> loss = head_loss(head, torch.zeros(1, 3, 4), torch.randn(9, 4), torch.tensor([[1, 8, 0]]))
    >>> round(float(loss.total), 4)  # the log of 9
    2.1972
    """
    weights = torch.ones(targets.shape, device=targets.device) if weights is None else weights
    if type(head) is LogitsHead and calls_own_forward(head):
        sums = head.cross_entropy(hidden, tokens, targets, weights, label_smoothing, z_loss)
    else:  # a module that was put in its place, or hooked, is called as it is
        logits = head(hidden, tokens).flatten(0, -2)
        sums = logits_cross_entropy(logits, targets.flatten(), weights.flatten(), label_smoothing, z_loss)
    total = weights.sum()
    count = torch.where(total > 0, total, 1.0)
    return Loss(sums.loss / count, sums.cross_entropy / count, sums.z / count if z_loss else None)


def build_head(model: ModelConfig) -> LogitsHead | ClassifierHead | ProjectedHead | None:
    """What follows the last hidden states or their pooler; None where they are what the model gives out."""
    if model.has_logits:
        return LogitsHead(model)
    if isinstance(model.head, ClassifierConfig):
        return ClassifierHead(model)
    return ProjectedHead(model) if isinstance(model.head, NoHeadConfig) and model.head.project else None


class DenseLayer(nn.Linear):
    """A linear layer and its activation."""

    def __init__(self, config: DenseConfig, in_features: int) -> None:
        super().__init__(in_features, config.out_features, bias=config.bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        return DENSE_ACTIVATIONS[self.activation](super().forward(x))


class Pooler(nn.Module):
    """One vector per sequence out of `[B, T, dim]`, pooled over its real tokens.

    Where the head says so, it goes through dense layers, and then is scaled to length 1.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.kind = model.head.pooler
        head = model.head if isinstance(model.head, PooledHeadConfig) else None
        self.normalize = head is not None and head.normalize
        self.dense = nn.Linear(model.dim, model.dim) if model.head.has_dense_pooler else None
        self.layers = nn.Sequential()
        features = model.dim
        for config in () if head is None else head.dense:
            self.layers.append(DenseLayer(config, features))
            features = config.out_features

    def forward(self, h: Tensor, attention_mask: Tensor | None) -> Tensor:
        pooled = self.pool(h, attention_mask)
        if self.layers:
            pooled = self.layers(pooled.to(h.dtype))
        if self.normalize:
            pooled = F.normalize(at_least_float32(pooled), dim=-1)
        return pooled.to(h.dtype)

    def pool(self, h: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The vector before dense layers and normalization; means are taken in at least float32."""
        if self.kind in ("first", "cls"):
            first_token = 0 if attention_mask is None else attention_mask.to(torch.int64).argmax(-1)
            return self.project(h[torch.arange(len(h), device=h.device), first_token])
        if self.kind in ("last", "last-dense"):
            behind = 0 if attention_mask is None else attention_mask.flip(-1).to(torch.int64).argmax(-1)
            return self.project(h[torch.arange(len(h), device=h.device), h.shape[1] - 1 - behind])
        if self.kind == "max":
            return (
                h.amax(1) if attention_mask is None else h.masked_fill(~attention_mask[..., None], -torch.inf).amax(1)
            )
        wide = at_least_float32(h)
        if attention_mask is None:
            return wide.mean(1)
        real = attention_mask[..., None].to(wide.dtype)
        return (wide * real).sum(1) / real.sum(1)

    def project(self, vector: Tensor) -> Tensor:
        """A token's vector `[B, dim]`, through the dense layer where there is one."""
        return vector if self.dense is None else torch.tanh(self.dense(vector))
