"""The attention contract: what every kind of attention is called with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position
from phasor.ops.attention import Mask


class CappedSinks(NamedTuple):
    """Positions of queries that attend to sink tokens: as the scheme prepared them, and as integers `[B or 1, T]`."""

    prepared: Any
    positions: Tensor


@dataclass(slots=True)
class AttentionContext:
    """What one layer's attention takes besides its input: the mask, and positions as its scheme prepared them.

    `position_weights` are what the scheme has learned for this layer alone. `step` stores what the layer keeps for its
    tokens and returns that of all keys; that of cross-attention is a `CrossStep`. `positions`, `[B or 1, T]`, and those
    of the keys in `step` are for schemes that act on scores. `capped_sinks` has the positions of queries that attend to
    sink tokens, where that distance is capped. Attention weights are appended to `weights` where a `Record` asks for
    them.
    """

    mask: Mask
    position: Position
    step: LayerStep
    prepared: Any = None
    position_weights: tuple[Any, ...] = ()
    positions: Tensor | None = None
    capped_sinks: CappedSinks | None = None
    weights: list[Tensor] | None = None

    def for_layer(self, x: Tensor) -> AttentionContext:
        """The context with positions that follow the layer's input `[B, T, dim]`, where the scheme's do."""
        if not self.position.config.follows_input:
            return self
        return replace(self, prepared=self.position.for_layer(x, self.prepared, self.position_weights, self.step))


class Attention(nn.Module):
    """A kind of attention. Positions come in through the hooks of the context's scheme."""

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        """A call's mask as this kind of attention takes it, for an input `[B, T, dim]` and so many keys.

        It is asked once for all layers with the same configuration. `positions`, of queries and of keys, are given
        where the layer's scheme acts on scores.
        """
        return mask

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement forward")
