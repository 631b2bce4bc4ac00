"""Vectors of tokens for every layer: where they come from, and what a block does with its vectors (Gemma 4 E2B)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ActivationConfig, ModelConfig
from phasor.nn.feed_forward import activate
from phasor.nn.norm import build_norm


class LayerEmbedding(nn.Module):
    """`(table[token] * sqrt(width) + norm(project(x) / sqrt(dim))) / sqrt(2)`: a vector for every token and layer.

    >>> parts = {"embedding": {"per_layer_width": 4}, "feedforward": {"activation": "geglu"}}
    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=3, num_heads=1, **parts)
    >>> LayerEmbedding(config)(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 3, 4])
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.embedding.per_layer_width is not None
        self.num_layers, self.width = model.num_layers, model.embedding.per_layer_width
        self.weight: Tensor = nn.Parameter(torch.zeros(model.vocab_size, self.num_layers * self.width))
        self.project = nn.Linear(model.dim, self.num_layers * self.width, bias=False)
        self.norm = build_norm(model.norm, self.width)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Vectors `[B, T, layers, width]` of tokens `[B, T]` and their embeddings `[B, T, dim]`."""
        shape = self.num_layers, self.width
        scale = torch.tensor(self.width**0.5, dtype=self.weight.dtype).item()  # rounded, as that of Gemma's embeddings
        own = (F.embedding(tokens, self.weight) * scale).unflatten(-1, shape)
        return (self.norm((self.project(x) * x.shape[-1] ** -0.5).unflatten(-1, shape)) + own) * 2**-0.5


class LayerInput(nn.Module):
    """`norm(project(act(gate(x)) * input))`: what a block adds to its output `x`, given its tokens' vectors."""

    def __init__(self, model: ModelConfig, activation: ActivationConfig) -> None:
        super().__init__()
        width = model.embedding.per_layer_width
        assert width is not None
        self.activation = activation
        self.gate = nn.Linear(model.dim, width, bias=False)
        self.project = nn.Linear(width, model.dim, bias=False)
        self.norm = build_norm(model.norm, model.dim)

    def forward(self, x: Tensor, layer_input: Tensor) -> Tensor:
        y: Tensor = self.norm(self.project(activate(torch.cat((self.gate(x), layer_input), dim=-1), self.activation)))
        return y
