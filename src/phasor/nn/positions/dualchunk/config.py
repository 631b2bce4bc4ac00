"""The configuration of dual chunk attention."""

from __future__ import annotations

from typing import Self

from phasor.config.positions import PositionConfig
from phasor.config.schema import at_least_one
from phasor.nn.positions.rotary.config import PiecewiseRotaryConfig


class DualChunkConfig(PiecewiseRotaryConfig, kind="dualchunk"):
    """Rotary within chunks; keys of earlier chunks are at distances that a model of `trained_length` has seen.

    In the chunk before the query's own, distances are true up to `trained_length - chunk_length` tokens back.
    """

    chunk_length: int = 3072
    trained_length: int = 4096

    def check(self) -> None:
        super().check()
        at_least_one(self, "chunk_length")
        if self.trained_length <= self.chunk_length:
            raise ValueError(
                f"DualChunkConfig.trained_length ({self.trained_length}) must be greater than chunk_length "
                f"({self.chunk_length}): their difference is how far distances stay true from chunk to chunk"
            )

    @property
    def shift_invariant(self) -> bool:
        return False

    @classmethod
    def for_lengths(cls, trained: int, largest: int) -> Self:
        chunk_length = max(1, 3 * trained // 4)
        return cls(chunk_length=chunk_length, trained_length=max(trained, chunk_length + 1))

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"dualchunk": cls(chunk_length=5, trained_length=8)}
