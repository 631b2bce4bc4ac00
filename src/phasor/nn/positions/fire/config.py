"""The configuration of FIRE."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_FEATURES, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class FIREConfig(PositionConfig, kind="fire"):
    """A small learned network of the distance as a share of the query's position, added to the scores.

    `hidden_dim` is the width of the network. `rate` and `threshold` are where the logarithm's rate and the least
    position to divide by start; both are learned. All layers share the weights, as in the paper's FIRE-S; its
    FIRE has weights for each layer.
    """

    hidden_dim: int = 32
    rate: float = 0.1
    threshold: float = 512.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)

    def check(self) -> None:
        positive(self, "hidden_dim", most=MOST_FEATURES)
        positive(self, "rate", "threshold")

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        width, heads = self.hidden_dim, model.num_heads
        return ((width,), (width,), (width, heads), (heads,), (1,), (1,))

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"fire": cls(hidden_dim=8, threshold=4.0)}
