"""The configuration of attention temperature by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.positions import PositionConfig
from phasor.config.schema import at_least_one, not_negative, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


# With the first, factors are 1 in the mean over positions below 1024.
DEFAULT_SCALES = {"log": 0.168, "floor": 0.1}


class TemperatureConfig(PositionConfig, kind="temperature"):
    """Queries are scaled by how many tokens there are up to them, so that attention stays sharp over long contexts.

    With `n` the query's position plus `first`, the form `"log"` multiplies by `max(scale log n, minimum)`, and with
    `learned` the scale is learned per head, shared by all layers; Scalable-Softmax has one per head and layer. The form
    `"floor"`, Llama 4's, multiplies by `1 + scale log(1 + floor(n / floor_length))`; Ministral 3 counts `n` from 0,
    which is `first=0`. The scale is 0.168 and 0.1 unless
    given.
    """

    form: Literal["log", "floor"] = "log"
    scale: float | None = None
    learned: bool = False
    minimum: float = 0.0
    floor_length: int = 8192
    first: Literal[0, 1] = 1
    acts_on: ClassVar[tuple[str, ...]] = ("queries",)

    def check(self) -> None:
        positive(self, "scale")
        not_negative(self, "minimum")
        at_least_one(self, "floor_length")
        if self.learned and self.form != "log":
            raise ValueError("TemperatureConfig.learned is for the form 'log'; the form 'floor' has a fixed scale")
        if self.first == 0 and self.form != "floor":
            raise ValueError("TemperatureConfig.first=0 is for the form 'floor'; the form 'log' counts from 1")
        if self.minimum and self.form != "log":
            raise ValueError("TemperatureConfig.minimum is for the form 'log'; the form 'floor' is at least 1")

    @property
    def chosen_scale(self) -> float:
        """The scale that was given, or the one of the form."""
        return self.scale if self.scale is not None else DEFAULT_SCALES[self.form]

    def marked_lengths(self) -> tuple[int, ...]:
        return (self.floor_length,) if self.form == "floor" else ()

    def check_model(self, model: ModelConfig) -> None:
        attentions = [model.layer(index).attention for index in range(max(1, len(model.layers)))]
        if capped := [type(attention).__name__ for attention in attentions if attention.cap_sinks]:
            raise ValueError(
                f"{capped[0]}.cap_sinks gives queries other positions for sink tokens, so that a temperature by "
                "position would differ from key to key: leave out one of the two"
            )

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.num_heads,),) if self.learned else ()

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"temperature": cls(scale=1.0, learned=True)}
