"""The configuration of KERPLE."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.positions import PositionConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class KERPLEConfig(PositionConfig, kind="kerple"):
    """A penalty that grows with the logarithm or a power of the distance, learned per head and shared by all layers."""

    form: Literal["log", "power"] = "log"
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.num_heads,), (model.num_heads,))
