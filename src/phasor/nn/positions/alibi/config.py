"""The configuration of ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class ALiBiConfig(PositionConfig, kind="alibi"):
    """A penalty of slope times distance on the scores, slopes geometric over the heads.

    `multiplier` scales all slopes: Falcon divides the penalty by sqrt(head_dim) together with the scores. With
    `learned` these are where the slopes start, shared by all layers.
    """

    max_bias: float = 8.0
    multiplier: float = 1.0
    learned: bool = False
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "max_bias", "multiplier")

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.num_heads,),) if self.learned else ()

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"alibi": cls(), "alibi-learned": cls(learned=True)}
