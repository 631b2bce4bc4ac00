"""GRAPE: queries and keys rotated by exponentials of position times a generator whose frequencies are learned."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, bias_dtype, layers_with
from phasor.nn.positions.grape.config import GRAPEConfig
from phasor.nn.positions.phase import ROTATION, increments
from phasor.nn.sequence import SequenceInfo
from phasor.ops.constants import constant
from phasor.ops.rope import (
    PhaseArgs,
    RopeArgs,
    rope_kernel,
    rope_kernel_why_not,
    rope_qkv_kernel,
    rotate_pairs,
    rotate_pairs_ref,
)

SHARE = 1 / 16  # of what is learned, that the logarithm of a frequency changes by: as the authors have it


Prepared = tuple[Tensor, str | None]  # positions [B or 1, T], and why no kernel rotates by them


class LearnedAngles(NamedTuple):
    """The cosines and sines of one layer, `[B or 1, T, 1, pairs]`, and why no kernel computes them."""

    cos: Tensor
    sin: Tensor
    why_not: str


LayerAngles = RopeArgs | PhaseArgs | LearnedAngles


class GRAPE(Position, config=GRAPEConfig):
    """Queries and keys rotated by `exp(m L)`, with `L` the sum of `theta_i L_i`, and `L_i` that of the pair `i`.

    `theta_i = base^(-2i/d) exp(w_i / 16)`, with `w` learned in every layer. A frequency is a 64-bit fraction of a
    rotation, so that phases are exact; its gradient goes through floats, from that of the angle of every token.
    """

    config: GRAPEConfig

    def __init__(self, config: GRAPEConfig, *, layers: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        frequencies = config.frequencies(head_dim)
        self.increments, self.initial = increments(frequencies), tuple(map(float, frequencies))
        self.weight = nn.ParameterList(torch.empty(len(frequencies)) for _ in range(layers))

    @classmethod
    def build(cls, config: GRAPEConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, layers=layers_with(config, model, side), head_dim=model.head_dim)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight in self.weight:
            nn.init.zeros_(weight)

    def layer_weights(self, layer: int) -> tuple[Tensor]:
        return (self.weight[layer],)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return rope_kernel_why_not(seq.positions, like)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        return seq.rows, self.why_not(seq, like)

    def for_layer(self, x: Tensor, prepared: Prepared, weights: tuple[Tensor], step: LayerStep) -> LayerAngles:
        positions, why_not = prepared
        growth = torch.expm1(weights[0].double() * SHARE)
        change = constant(self.initial, growth.device, torch.float64) * growth
        turns = change.detach() / (2 * math.pi)
        learned = ((turns - turns.round()) * 2.0**63).to(torch.int64) * 2
        per_position = constant(self.increments, growth.device, torch.int64) + learned
        trained = torch.is_grad_enabled() and change.requires_grad
        zeros = positions[..., None] * (change - change.detach()) if trained else None
        if why_not is None and zeros is None:
            return RopeArgs(positions, per_position, constant((1.0,), growth.device, torch.float32))
        phases = positions[..., None] * per_position
        if why_not is None:
            assert zeros is not None
            return PhaseArgs(phases[:, :, None], zeros[:, :, None].float())
        angle = phases.double() * (2 * math.pi / ROTATION)
        if zeros is not None:
            angle = angle + zeros
        cos, sin = (part.to(bias_dtype(x))[:, :, None] for part in (angle.cos(), angle.sin()))
        return LearnedAngles(cos, sin, why_not)

    def kernel_why_not(self, prepared: LayerAngles) -> str | None:
        return prepared.why_not if isinstance(prepared, LearnedAngles) else None

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: LayerAngles) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(prepared, LearnedAngles):
            return *rope_kernel(q, k, prepared, self.config.pairing), v
        return super().on_heads(q, k, v, prepared)

    def on_projection(self, projected: Tensor, prepared: LayerAngles) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(prepared, LearnedAngles):
            return rope_qkv_kernel(projected, prepared, self.config.pairing)
        return super().on_projection(projected, prepared)

    def on_query(self, q: Tensor, prepared: LayerAngles) -> Tensor:
        return self._rotate(q, prepared)

    def on_key(self, k: Tensor, prepared: LayerAngles) -> Tensor:
        return self._rotate(k, prepared)

    def _rotate(self, x: Tensor, prepared: LayerAngles) -> Tensor:
        if not isinstance(prepared, LearnedAngles):
            return rope_kernel(x, x[:, :, :0], prepared, self.config.pairing)[0]
        rotate = rotate_pairs_ref if prepared.cos.requires_grad else rotate_pairs
        return rotate(x, prepared.cos, prepared.sin, self.config.pairing)
