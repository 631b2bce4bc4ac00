"""The configuration of counting."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class CountingConfig(PositionConfig, kind="counting"):
    """The position itself times a learned direction, added to the input: naive, and unbounded."""

    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.input_width,),)
