"""A Llama written out in plain torch: the reference for whole models in float64, and one of those that are timed."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.bench.rope import rotary_table, rotate_ref
from phasor.config import RMSNormConfig
from phasor.nn.attention.softmax.module import SoftmaxAttention
from phasor.transformer import Transformer


class ReferenceLayer(nn.Module):
    """Attention and a gated feed-forward network, with a norm before each."""

    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    out: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    attention_norm: nn.Parameter
    mlp_norm: nn.Parameter

    def __init__(self, weights: dict[str, Tensor], heads: int, groups: int, eps: float) -> None:
        super().__init__()
        self.heads, self.groups, self.eps = heads, groups, eps
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.detach().clone()))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.attention_norm, self.eps)
        q, k, v = (
            F.linear(h, weight).unflatten(-1, (count, -1)).transpose(1, 2)
            for weight, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = (rotate_ref(part, cos, sin).to(x.dtype) for part in (q, k))
        if x.is_cuda and x.dtype == torch.float32:  # no kernel for it shares keys, and all scores would be held
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(y.transpose(1, 2).flatten(-2), self.out)
        h = F.rms_norm(x, x.shape[-1:], self.mlp_norm, self.eps)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class ReferenceLlama(nn.Module):
    """Token embedding, layers, norm and a tied head, with the weights of a phasor model."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Transformer, length: int) -> None:
        super().__init__()
        config, norm = model.config, model.config.norm
        assert isinstance(norm, RMSNormConfig)
        assert model.decoder is not None
        self.eps = norm.eps
        self.tokens = nn.Parameter(model.tokens.weight.detach().clone())
        self.norm = nn.Parameter(model.decoder.get_parameter("norm.weight").detach().clone())
        heads, hidden = (config.num_heads, config.num_kv_heads), config.hidden_dim
        self.layers = nn.ModuleList(
            ReferenceLayer(layer_weights(block, hidden), *heads, norm.eps) for block in model.decoder.blocks
        )
        cos, sin = rotary_table(torch.arange(length), config.head_dim)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.tokens)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of every token but the first in its row."""
        logits = self(tokens)[:, :-1].flatten(0, 1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, tokens[:, 1:].flatten())


def layer_weights(block: nn.Module, hidden: int) -> dict[str, Tensor]:
    """The weights of a phasor block, with its fused projections split."""
    attention = cast(SoftmaxAttention, block.get_submodule("attention"))
    parts = attention.split_rows(attention.qkv.weight, "qkv")
    found = {name: view.flatten(0, 2) for view, name, _ in parts}
    gate, up = block.get_parameter("feedforward.up.weight").split(hidden)
    return found | {
        "out": attention.out.weight,
        "gate": gate,
        "up": up,
        "down": block.get_parameter("feedforward.down.weight"),
        "attention_norm": block.get_parameter("residual.norms.0.weight"),
        "mlp_norm": block.get_parameter("residual.norms.1.weight"),
    }
