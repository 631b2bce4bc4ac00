"""The position contract: three places where a scheme may act, three hooks that do nothing by default.

A scheme overrides the hooks it needs. `prepare` runs once per forward and scheme, and what it returns is
handed to the hooks of every layer, so that nothing is computed twice and nothing about positions is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from phasor.config import ModelConfig, NoPositionConfig, PositionConfig
from phasor.config.model import Side
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention.bias import Bias
from phasor.ops.rope.rope import split_qkv


class Position(nn.Module):
    """A position scheme. The base class is the scheme that does nothing."""

    config: PositionConfig = NoPositionConfig()

    @property
    def axes(self) -> int:
        """How many position rows a token has."""
        return self.config.axes

    def prepare(self, places: SequenceInfo, like: Tensor) -> Any:
        """What the hooks inside layers need, for activations of the dtype and device of `like`."""
        return None

    def on_input(self, x: Tensor, places: SequenceInfo) -> Tensor:
        """Token vectors `[B, T, dim]` with positions in them."""
        return x

    def on_query(self, q: Tensor, prepared: Any) -> Tensor:
        """Queries `[B, T, H, D]` with positions in them."""
        return q

    def on_key(self, k: Tensor, prepared: Any) -> Tensor:
        """Keys `[B, T, K, D]` with positions in them."""
        return k

    def on_value(self, v: Tensor, prepared: Any) -> Tensor:
        """Values `[B, T, K, D]` with positions in them."""
        return v

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same tokens, each by its hook: for schemes that take them together faster."""
        return self.on_query(q, prepared), self.on_key(k, prepared), self.on_value(v, prepared)

    def on_projection(self, projected: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The same of a projection `[B, T, K, H/K + 2, D]`, in which a group has its queries, its key and its value."""
        q, k, v = split_qkv(projected)
        return self.on_heads(q.flatten(-3, -2), k, v, prepared)

    def on_scores(self, prepared: Any) -> Bias | None:
        """What positions add to scores, asked for block by block; None for nothing."""
        return None

    def reset_parameters(self, config: ModelConfig) -> None:
        """Draw fresh weights, if the scheme has any."""


# Builds the module of a scheme for one side of a model.
Builder = Callable[[Any, ModelConfig, Side], Position]
