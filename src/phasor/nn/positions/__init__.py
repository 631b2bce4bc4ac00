"""Position schemes: one file each, and the table that says which module computes which configuration."""

from __future__ import annotations

from phasor.config import (
    ALiBiConfig,
    CountingConfig,
    LearnedConfig,
    ModelConfig,
    NoPositionConfig,
    NormalizedConfig,
    PositionConfig,
    RotaryConfig,
    SinusoidalConfig,
    T5PositionConfig,
)
from phasor.config.model import Side
from phasor.nn.positions.alibi import ALiBi
from phasor.nn.positions.base import Builder, Position
from phasor.nn.positions.learned import Learned
from phasor.nn.positions.naive import Counting, Normalized
from phasor.nn.positions.rotary import Rotary
from phasor.nn.positions.sinusoidal import Sinusoidal
from phasor.nn.positions.t5 import T5Bias

BUILDERS: dict[type[PositionConfig], Builder] = {
    NoPositionConfig: lambda config, model, side: Position(),
    SinusoidalConfig: Sinusoidal.build,
    LearnedConfig: Learned.build,
    CountingConfig: Counting.build,
    NormalizedConfig: Normalized.build,
    T5PositionConfig: T5Bias.build,
    ALiBiConfig: ALiBi.build,
    RotaryConfig: Rotary.build,
}


def build_position(config: PositionConfig, model: ModelConfig, side: Side) -> Position:
    """The module that computes a scheme, for the encoder or the decoder of a model."""
    for cls in type(config).__mro__:
        if cls in BUILDERS:
            return BUILDERS[cls](config, model, side)
    raise ValueError(f"no module computes the position scheme {config.kind!r}; add one to BUILDERS")


__all__ = ["BUILDERS", "Position", "Rotary", "build_position"]
