"""The configuration of sinusoidal positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_FEATURES, greater_than_one, not_negative, positive
from phasor.nn.positions.frequencies import Spacing

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class SinusoidalConfig(PositionConfig, kind="sinusoidal"):
    """Fixed sines and cosines of the position, added to the input or concatenated and projected.

    With `zero_padding` padding has none. Where neither positions nor an attention mask is given, positions count tokens
    other than `padding_token` (M2M-100).
    """

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    spacing: Spacing = "width"
    offset: int = 0
    zero_padding: bool = False
    padding_token: int | None = None
    combine: Literal["add", "concat"] = "add"
    width: int | None = None
    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        greater_than_one(self, "base")
        positive(self, "width", most=MOST_FEATURES)
        not_negative(self, "offset", "padding_token")
        if self.width is not None and self.combine == "add":
            raise ValueError("SinusoidalConfig.width is for combine='concat'; added codes have the model's width")

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        dim = model.input_width
        return ((dim, dim + (self.width or dim)),) if self.combine == "concat" else ()

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {
            "sinusoidal": cls(),
            "sinusoidal-halves": cls(layout="halves", spacing="ends", offset=2, zero_padding=True),
            "sinusoidal-concat": cls(combine="concat", width=7),
        }
