"""Accumulated rotary: queries and keys rotated by running sums over the input, in fixed-point turns."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.accumulated.config import AccumulatedRotaryConfig
from phasor.nn.positions.base import Position, layers_with
from phasor.nn.positions.phase import ROTATION, increments
from phasor.nn.positions.sums import Steps, Sums, running_sums
from phasor.nn.sequence import SequenceInfo
from phasor.ops.constants import constant
from phasor.ops.dispatch import no_autocast
from phasor.ops.linear_float32 import linear_float32
from phasor.ops.rope import PhaseArgs, rope_kernel, rope_kernel_why_not, rope_qkv_kernel, rotate_pairs_ref
from phasor.ops.running_sums import fixed_angles

INITIAL_SHARE = 0.1  # of a pair's frequency, that the learned part adds at first for inputs of variance 1


class Rotations(NamedTuple):
    """Cosines and sines of the tokens of one call, `[B, T, heads, pairs]`, for queries and for keys."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    why_not: str | None = None  # why no kernel computes them


class AccumulatedRotary(Position, config=AccumulatedRotaryConfig):
    """The pair `i` of a key/value head is rotated by the sum of `theta_i + w_i x_s` over all tokens up to its own.

    Query heads that share a key have its angles. A cache holds the sums of its tokens, to continue from the last.
    """

    config: AccumulatedRotaryConfig

    def __init__(
        self,
        config: AccumulatedRotaryConfig,
        *,
        layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.config, self.num_kv_heads, self.queries_per_kv = config, num_kv_heads, num_heads // num_kv_heads
        self.head_dim = head_dim
        self.increments = increments(config.frequencies(head_dim))
        num_angles = num_kv_heads * len(self.increments)
        self.weight = nn.ParameterList(torch.empty(num_angles, dim) for _ in range(layers))

    @classmethod
    def build(cls, config: AccumulatedRotaryConfig, model: ModelConfig, side: Side) -> Self:
        sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        return cls(config, layers=layers_with(config, model, side), dim=model.dim, **sizes)

    def reset_parameters(self, config: ModelConfig) -> None:
        frequencies = [float(frequency) for frequency in self.config.frequencies(self.head_dim)]
        for weight in self.weight:
            nn.init.normal_(weight, std=INITIAL_SHARE * config.dim**-0.5)
            with torch.no_grad():
                weight.mul_(weight.new_tensor(frequencies).repeat(len(weight) // len(frequencies))[:, None])

    @property
    def own_kv_heads(self) -> int:
        """The key/value heads of this process."""
        return self.num_kv_heads // self.head_part[1]

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor | None:
        return seq.attention_mask

    def layer_weights(self, layer: int) -> tuple[Tensor]:
        return (self.weight[layer],)

    def steps(self, x: Tensor, weights: tuple[Tensor], prepared: Tensor | None) -> Steps:
        """What the tokens of a layer's input `[B, T, dim]` add to the angles, in fractions of a rotation."""
        with no_autocast(x):
            radians = self.own_heads(linear_float32(x, weights[0]))
        own = constant(self.increments * self.own_kv_heads, x.device, torch.int64)
        return Steps(fixed_angles(radians, own), radians).mask_padding(prepared)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return rotation_why_not(seq.positions.shape[-1], seq.positions, like)

    def kernel_why_not(self, prepared: PhaseArgs | Rotations) -> str | None:
        return prepared.why_not if isinstance(prepared, Rotations) else None

    def for_layer(
        self, x: Tensor, prepared: Tensor | None, weights: tuple[Tensor], step: LayerStep
    ) -> PhaseArgs | Rotations:
        sums, _ = running_sums("angle_sums", self.steps(x, weights, prepared), step)
        why_not = rotation_why_not(x.shape[1], sums.fixed, x)
        if why_not is not None:
            return self.rotations(sums)._replace(why_not=why_not)
        shape = (self.own_kv_heads, -1)
        return PhaseArgs(
            sums.fixed.unflatten(-1, shape), None if sums.zeros is None else sums.zeros.unflatten(-1, shape)
        )

    def rotations(self, sums: Sums) -> Rotations:
        """The rotations of the tokens of this call, queries and keys alike: those in a cache are rotated already."""
        angle = sums.fixed.to(torch.float64) * (2 * math.pi / ROTATION)
        if sums.zeros is not None:
            angle = angle + sums.zeros
        angle = angle.unflatten(-1, (self.own_kv_heads, -1))
        key = torch.cos(angle), torch.sin(angle)
        cos, sin = (x.repeat_interleave(self.queries_per_kv, dim=2) for x in key)
        return Rotations((cos, sin), key)

    def on_heads(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: PhaseArgs | Rotations
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, PhaseArgs):
            return *rope_kernel(q, k, prepared, self.config.pairing), v
        return super().on_heads(q, k, v, prepared)

    def on_projection(self, projected: Tensor, prepared: PhaseArgs | Rotations) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, PhaseArgs):
            return rope_qkv_kernel(projected, prepared, self.config.pairing)
        return super().on_projection(projected, prepared)

    def on_query(self, q: Tensor, prepared: PhaseArgs | Rotations) -> Tensor:
        if isinstance(prepared, PhaseArgs):
            return rope_kernel(q, q[:, :, :0], prepared, self.config.pairing)[0]
        return self._rotate(q, *prepared.query)

    def on_key(self, k: Tensor, prepared: PhaseArgs | Rotations) -> Tensor:
        if isinstance(prepared, PhaseArgs):
            return rope_kernel(k, k[:, :, :0], prepared, self.config.pairing)[0]
        return self._rotate(k, *prepared.key)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The angles have gradients, which only the reference of the rotation computes in torch."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rotate_pairs_ref(x, cos.to(dtype), sin.to(dtype), self.config.pairing)


def rotation_why_not(tokens: int, positions: Tensor, like: Tensor) -> str | None:
    """Why no kernel rotates that many tokens of the dtype of `like`; None where it does."""
    return "one token takes few operations" if tokens == 1 else rope_kernel_why_not(positions, like)
