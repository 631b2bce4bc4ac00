"""Inkling's relative bias: profiles of the distance, mixed by weights that are projected from the query's token."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, bias_dtype, layers_with, relative_init_std
from phasor.nn.positions.profiles.config import ProfilesConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceRows, Mask, ProductBias, ScoreMod


class Mixed(NamedTuple):
    """One layer's weights of profiles `[B, T, H, rank]`, profiles by distance, and factors `[B or 1, T, 1, 1]`.

    The profiles, `[rows, 1, rank]`, begin with zeros for keys ahead and end with zeros for keys beyond them.
    """

    weights: Tensor
    profiles: Tensor
    factor: Tensor | None


class Profiles(Position, config=ProfilesConfig):
    """`t_m (q_m k_n + sum_i w_mi p_i(m - n))`, with `w_m` projected from the layer's input at `m` for each head.

    `t_m` is 1, or the factor of `log_floor`: a function of an integer count, computed in float64.
    """

    config: ProfilesConfig

    def __init__(self, config: ProfilesConfig, *, layers: int, num_heads: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.projection = nn.ParameterList(torch.empty(num_heads * config.rank, dim) for _ in range(layers))
        self.profiles = nn.ParameterList(torch.empty(config.rank, config.extent) for _ in range(layers))

    @classmethod
    def build(cls, config: ProfilesConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, layers=layers_with(config, model, side), num_heads=model.num_heads, dim=model.dim)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=relative_init_std(config))

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor | None:
        """The factors of scores, where they grow with the position."""
        if self.config.log_floor is None:
            return None
        count = (seq.rows + 1).clamp(min=self.config.log_floor).to(torch.float64)
        factor = 1 + self.config.log_scale * torch.log(count / self.config.log_floor)
        return factor.to(bias_dtype(like))[:, :, None, None]

    def layer_weights(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.projection[layer], self.profiles[layer]

    def for_layer(self, x: Tensor, prepared: Tensor | None, weights: tuple[Tensor, Tensor], step: LayerStep) -> Mixed:
        projection, profiles = (weight.to(x.dtype) for weight in weights)
        mixed = self.own_heads(F.linear(x, projection)).unflatten(-1, (-1, self.config.rank))
        return Mixed(scale_tokens(mixed, prepared), F.pad(profiles.T, (0, 0, 1, 1))[:, None], prepared)

    def on_query(self, q: Tensor, prepared: Mixed) -> Tensor:
        return scale_tokens(q, prepared.factor)

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Mixed
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        queries, keys = score_mod.query_positions, score_mod.key_positions
        assert queries is not None
        assert keys is not None
        rows = DistanceRows(queries, keys, self.config.extent, least=-1)
        return q, k, replace(score_mod, bias=ProductBias(prepared.weights, k, rows, 1.0, prepared.profiles))


def scale_tokens(x: Tensor, factor: Tensor | None) -> Tensor:
    """`[B, T, H, D]` times factors of its tokens, in its own dtype."""
    return x if factor is None else (x * factor).to(x.dtype)
