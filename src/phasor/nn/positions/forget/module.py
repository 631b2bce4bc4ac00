"""Forget gates (the Forgetting Transformer): the logarithms of gates, summed over the tokens between key and query."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, layers_with, relative_init_std
from phasor.nn.positions.forget.config import ForgetGateConfig
from phasor.nn.positions.sums import Steps, running_sums
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import SumBias
from phasor.ops.dispatch import no_autocast
from phasor.ops.linear_float32 import linear_float32

UNIT = 2.0**-32  # of the sums, in nats: a difference may be as large as 2^31 nats
LEAST = -1024.0  # of the logarithm of a gate: its exponential is 0 in any dtype


class ForgetGate(Position, config=ForgetGateConfig):
    """`-|c_i - c_j|` with `c_t` the sum of `log sigmoid(w x_s + b)` up to `t`, for each head and layer.

    In a decoder that is `c_i - c_j`, the logarithm of the product of the gates after key `j` up to query `i`.
    """

    config: ForgetGateConfig

    def __init__(self, config: ForgetGateConfig, *, layers: int, num_heads: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.ParameterList(torch.empty(num_heads, dim) for _ in range(layers))
        self.bias = nn.ParameterList(torch.empty(num_heads) for _ in range(layers))

    @classmethod
    def build(cls, config: ForgetGateConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, layers=layers_with(config, model, side), num_heads=model.num_heads, dim=model.dim)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight, bias in zip(self.weight, self.bias, strict=True):
            nn.init.normal_(weight, std=relative_init_std(config))
            nn.init.constant_(bias, self.config.initial_bias)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor | None:
        return seq.attention_mask

    def layer_weights(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.weight[layer], self.bias[layer]

    def steps(self, x: Tensor, weights: tuple[Tensor, Tensor], prepared: Tensor | None) -> Steps:
        """The logarithms of the gates of a layer's input `[B, T, dim]`."""
        with no_autocast(x):
            logits = linear_float32(x, *weights)
            logs = nn.functional.logsigmoid(self.own_heads(logits)).clamp(min=LEAST)
        return Steps((logs.detach().double() / UNIT).round().to(torch.int64), logs).mask_padding(prepared)

    def for_layer(self, x: Tensor, prepared: Tensor | None, weights: tuple[Tensor, Tensor], step: LayerStep) -> SumBias:
        queries, keys = running_sums("gate_sums", self.steps(x, weights, prepared), step)
        return SumBias(queries.fixed, keys.fixed, UNIT, queries.zeros, keys.zeros)

    def on_scores(self, prepared: SumBias) -> SumBias:
        return prepared
