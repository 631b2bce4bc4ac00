"""PoPE: each feature of a query or key is the magnitude of a complex number, and its position the phase."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, bias_dtype, layers_with
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.positions.pope.config import PoPEConfig
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.constants import constant
from phasor.ops.polar import PolarArgs, polar_features, polar_why_not
from phasor.ops.rope import split_qkv

CosSin = tuple[Tensor, Tensor]  # of the phases of queries or keys, [B or 1, T, 1 or heads, D]


class Phases(NamedTuple):
    """The phases of queries, less the learned shift after `for_layer`, and of all keys."""

    query: CosSin
    key: CosSin
    why_not: str  # why no kernel computes their cosines and sines


class KernelPhases(NamedTuple):
    """The same for the kernel."""

    query: PolarArgs
    key: PolarArgs


Prepared = Phases | KernelPhases


class PoPE(Position, config=PoPEConfig):
    """The sum over features of `softplus(q_m) softplus(k_n) cos((n - m) theta + delta)`, times the scale.

    A shift `delta` for each feature of a key/value head is learned in every layer, and clamped to `[-2 pi, 0]`. Caches
    keep magnitudes; attention takes products of `2 D` features, the cosines and then the sines.
    """

    config: PoPEConfig

    def __init__(self, config: PoPEConfig, *, layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.queries_per_kv, self.head_dim = config, num_heads // num_kv_heads, head_dim
        self.increments = increments(config.frequencies(head_dim))
        self.shift = nn.ParameterList(torch.empty(num_kv_heads * head_dim) for _ in range(layers))

    @classmethod
    def build(cls, config: PoPEConfig, model: ModelConfig, side: Side) -> Self:
        sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        return cls(config, layers=layers_with(config, model, side), **sizes)

    def reset_parameters(self, config: ModelConfig) -> None:
        for shift in self.shift:
            nn.init.zeros_(shift)

    def layer_weights(self, layer: int) -> tuple[Tensor]:
        return (self.shift[layer],)

    def phases(self, positions: Tensor, like: Tensor) -> CosSin:
        """The phases of positions `[B or 1, T]`."""
        per_position = constant(self.increments, positions.device, torch.int64)
        return cos_sin_of(positions[..., None, None], per_position, bias_dtype(like))

    def key_phases(self, positions: Tensor) -> PolarArgs:
        """The same for the kernel."""
        return PolarArgs(positions[..., None] * constant(self.increments, positions.device, torch.int64))

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return polar_why_not(seq.positions.shape[-1], like)

    def kernel_why_not(self, prepared: Prepared) -> str | None:
        return prepared.why_not if isinstance(prepared, Phases) else None

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        why_not = self.why_not(seq, like)
        if why_not is None:
            args = self.key_phases(seq.rows)
            return KernelPhases(args, args)
        phases = self.phases(seq.rows, like)
        return Phases(phases, phases, why_not)

    def prepare_keys(self, prepared: Prepared, keys: KeyInfo, like: Tensor) -> Prepared:
        if isinstance(prepared, KernelPhases):
            return prepared._replace(key=self.key_phases(keys.positions))
        return prepared._replace(key=self.phases(keys.positions, like))

    def for_layer(self, x: Tensor, prepared: Prepared, weights: tuple[Tensor], step: LayerStep) -> Prepared:
        shift = self.own_heads(weights[0]).unflatten(-1, (-1, self.head_dim)).clamp(-2 * math.pi, 0.0)  # [K, D]
        if isinstance(prepared, KernelPhases):
            return prepared._replace(query=with_shift(prepared.query, shift))
        cos, sin = prepared.query
        shift = shift.repeat_interleave(self.queries_per_kv, dim=0).to(cos.dtype)  # [H, D]
        of_shift = shift.cos(), shift.sin()
        less = cos * of_shift[0] + sin * of_shift[1], sin * of_shift[0] - cos * of_shift[1]
        return prepared._replace(query=less)

    def on_projection(self, projected: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Queries with their phases already: no cache keeps them."""
        if isinstance(prepared, Phases):
            return super().on_projection(projected, prepared)
        q, k, v = split_qkv(projected)
        return polar_features(q, prepared.query, positive=False), softplus(k), v

    def on_query(self, q: Tensor, prepared: Prepared) -> Tensor:
        return softplus(q)

    def on_key(self, k: Tensor, prepared: Prepared) -> Tensor:
        return softplus(k)

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Prepared
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        if isinstance(prepared, Phases):
            return with_phases(q, prepared.query), with_phases(k, prepared.key), score_mod
        if q.shape[-1] == self.head_dim:
            q = polar_features(q, prepared.query, positive=True)
        return q, polar_features(k, prepared.key, positive=True), score_mod


def with_shift(args: PolarArgs, shift: Tensor) -> PolarArgs:
    """Phases less a shift `[K, D]` in radians, which gets a gradient where it is learned."""
    turns = shift.detach().double() / (2 * math.pi)
    fixed = ((turns - turns.round()) * 2.0**63).to(torch.int64) * 2
    trained = torch.is_grad_enabled() and shift.requires_grad
    return PolarArgs(args.phases, fixed, (shift - shift.detach()).float() if trained else None)


def with_phases(magnitudes: Tensor, phases: CosSin) -> Tensor:
    """Magnitudes `[B, T, heads, D]` times the cosines, and then times the sines, of their phases."""
    return torch.cat([magnitudes * part for part in phases], dim=-1).to(magnitudes.dtype)
