"""The model's last layer: logits over the vocabulary, hidden states, or one pooled vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import FeedForwardConfig, LogitsConfig, MaskedHeadConfig, ModelConfig
from phasor.parts.feedforward import activate
from phasor.parts.norm import build_norm


class LogitsHead(nn.Module):
    """`softcap(multiplier * (h W^T + b))`, W the token table where the two are tied.

    A masked-language-model head first passes `h` through a dense layer, an activation and a norm.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert isinstance(model.head, LogitsConfig)
        config, width = model.head, model.embedding.width
        self.softcap = config.softcap
        self.multiplier = model.dim**-0.5 if config.multiplier == "rsqrt" else config.multiplier
        self.activation = FeedForwardConfig(activation=getattr(config, "activation", "gelu"))
        masked = isinstance(config, MaskedHeadConfig)
        self.dense = nn.Linear(model.dim, model.dim) if masked else None
        self.norm = build_norm(model.norm, model.dim) if masked else None
        self.project = nn.Linear(model.dim, width, bias=False) if width else None
        tied = model.embedding.tied
        self.weight = None if tied else nn.Parameter(torch.empty(model.vocab_size, width or model.dim))
        self.bias = nn.Parameter(torch.zeros(model.vocab_size)) if config.bias else None

    def forward(self, h: Tensor, table: Tensor) -> Tensor:
        if self.dense is not None and self.norm is not None:
            h = self.norm(activate(self.dense(h), self.activation))
        if self.project is not None:
            h = self.project(h)
        logits = F.linear(h, table if self.weight is None else self.weight, self.bias)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Pooler(nn.Module):
    """One vector a sequence: `tanh(dense(h_first))`, or the mean over the real tokens."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(model.dim, model.dim) if model.head.pooler == "first" else None

    def forward(self, h: Tensor, padding: Tensor | None) -> Tensor:
        if self.dense is not None:
            if padding is None:
                return torch.tanh(self.dense(h[:, 0]))
            first = padding.to(torch.int64).argmax(-1)
            return torch.tanh(self.dense(h[torch.arange(len(h), device=h.device), first]))
        if padding is None:
            return h.mean(1)
        real = padding[..., None].to(h.dtype)
        return (h * real).sum(1) / real.sum(1)
