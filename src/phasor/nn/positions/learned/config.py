"""The configuration of learned absolute positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_WIDTH, not_negative, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class LearnedConfig(PositionConfig, kind="learned"):
    """A table of learned vectors, one per position, added to the input; it ends at its maximum length.

    Without a `max_length` the table has the model's. Where neither positions nor an attention mask is given,
    positions count tokens other than `padding_token`, which itself has the row before the first (RoBERTa).
    """

    max_length: int | None = None
    offset: int = 0
    padding_token: int | None = None
    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        positive(self, "max_length", most=MOST_WIDTH)
        not_negative(self, "offset", "padding_token", most=MOST_WIDTH)
        if self.padding_token is not None and self.offset == 0:
            raise ValueError("LearnedConfig.padding_token needs offset: its row stands before the first position's")

    @property
    def max_positions(self) -> int | None:
        return self.max_length

    def keeps_rows(self, before: PositionConfig) -> bool:
        return isinstance(before, LearnedConfig) and self.offset == before.offset

    def resolve(self, model: ModelConfig) -> LearnedConfig:
        return self if self.max_length is not None else self.replace(max_length=model.max_length)

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return (((self.max_length or model.max_length) + self.offset, model.input_width),)

    @classmethod
    def for_lengths(cls, trained: int, largest: int) -> Self:
        return cls(max_length=largest)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"learned": cls(), "learned-offset": cls(offset=2)}
