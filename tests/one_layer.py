"""One layer's attention in float64, beside the parts that a paper's formula takes."""

from __future__ import annotations

import torch
from schemes import build, tiny
from torch import Tensor, nn

from phasor import Record
from phasor.config import PositionConfig
from phasor.nn.sequence import sequence_info

HEADS, HEAD_DIM, DIM, COUNT = 4, 8, 32, 23


class OneLayer:
    """The attention of one layer without its output projection, and the weights of that layer in float64."""

    def __init__(self, position: PositionConfig, **changes: object) -> None:
        config = tiny(position, **{"num_layers": 1, "shape": "encoder", "num_kv_heads": HEADS, **changes})
        self.stack = getattr(build(config).double().requires_grad_(False), config.shape)
        self.scheme, self.attention = self.stack.position(0), self.stack.blocks[0].attention
        self.attention.out = nn.Identity()
        self.x = torch.randn(2, COUNT, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def __call__(self) -> Tensor:
        seq = sequence_info(2, COUNT, self.x.device)
        return self.attention(self.x, self.stack._self_attention_contexts(self.x, seq, None, None, [Record()])[0])

    def projections(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The weights and biases of queries, keys and values."""
        qkv = self.attention.qkv
        weights, biases = (self.attention.split_rows(x, "qkv") for x in (qkv.weight, qkv.bias))
        rows = zip("qkv", weights, biases, strict=True)
        return {name: (w[0].flatten(0, 2), b[0].flatten()) for name, w, b in rows}

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, T, heads, D]`, the last two repeated for all heads."""
        projected = self.attention.project(self.x)
        q, k, v = projected.split((projected.shape[-2] - 2, 1, 1), dim=-2)
        return q.flatten(2, 3), *(x.expand_as(q).flatten(2, 3) for x in (k, v))
