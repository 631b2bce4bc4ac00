"""The configuration of multiplicative GRAPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasor.nn.positions.rotary.config import LearnedRotaryConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class GRAPEConfig(LearnedRotaryConfig, kind="grape"):
    """Rotary positions whose frequencies each layer learns: rotations that commute (multiplicative GRAPE).

    `base` and `pairing` are those of the rotary positions that it is before training.
    """

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.head_dim // 2,),)
