"""Several position schemes in one layer: each hook calls those of the parts, one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, build_position
from phasor.nn.positions.combined.config import CombinedConfig
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import Bias, Mask, ScoreMod, TokenBias

Prepared = Sequence[Any]


@dataclass
class SumOfBiases:
    """Biases of several schemes, added. Not frozen: made in compiled code, it would lose its field in torch 2.11."""

    biases: tuple[Bias, ...]

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What may get a gradient."""
        return tuple(x for bias in self.biases for x in getattr(bias, "learned", ()))

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        first, *rest = (bias(queries, keys) for bias in self.biases)
        for bias in rest:
            first = first + bias
        return first


class Combined(Position, config=CombinedConfig):
    """The parts in the order they are listed. A single bias among them takes the kernel that it takes alone.

    >>> config = ModelConfig(vocab_size=9, dim=16, num_layers=1, num_heads=2, position="combined")
    >>> [type(part).__name__ for part in Combined.build(config.position, config, "decoder").parts]
    ['Rotary', 'ALiBi']
    """

    config: CombinedConfig

    def __init__(self, config: CombinedConfig, parts: Sequence[Position]) -> None:
        super().__init__()
        self.config = config
        self.schemes = nn.ModuleList(parts)
        self.depends_on_window = any(part.depends_on_window for part in parts)

    @classmethod
    def build(cls, config: CombinedConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, [build_position(scheme, model, side) for scheme in config.schemes])

    @property
    def parts(self) -> list[Position]:
        """The modules of the schemes."""
        return [cast(Position, scheme) for scheme in self.schemes]

    @property
    def rotating(self) -> int | None:
        """Which part rotates keys; None where none does."""
        found = [i for i, scheme in enumerate(self.config.schemes) if "keys" in scheme.acts_on]
        return found[0] if found else None

    def reset_parameters(self, config: ModelConfig) -> None:
        for part in self.parts:
            part.reset_parameters(config)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        return [part.prepare(seq, like) for part in self.parts]

    def prepare_keys(self, prepared: Prepared, keys: KeyInfo, like: Tensor) -> Prepared:
        return [part.prepare_keys(own, keys, like) for part, own in zip(self.parts, prepared, strict=True)]

    def layer_weights(self, layer: int) -> tuple[Any, ...]:
        return tuple(part.layer_weights(layer) for part in self.parts)

    def for_layer(self, x: Tensor, prepared: Prepared, weights: tuple[Any, ...], step: LayerStep) -> Prepared:
        each = zip(self.parts, prepared, weights, strict=True)
        return [part.for_layer(x, own, learned, step) for part, own, learned in each]

    def on_query(self, q: Tensor, prepared: Prepared) -> Tensor:
        for part, own in zip(self.parts, prepared, strict=True):
            q = part.on_query(q, own)
        return q

    def on_key(self, k: Tensor, prepared: Prepared) -> Tensor:
        for part, own in zip(self.parts, prepared, strict=True):
            k = part.on_key(k, own)
        return k

    def on_value(self, v: Tensor, prepared: Prepared) -> Tensor:
        for part, own in zip(self.parts, prepared, strict=True):
            v = part.on_value(v, own)
        return v

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        for part, own in zip(self.parts, prepared, strict=True):
            q, k, v = part.on_heads(q, k, v, own)
        return q, k, v

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        if self.rotating is None:
            return super().why_not(seq, like)
        return self.parts[self.rotating].why_not(seq, like)

    def kernel_why_not(self, prepared: Prepared) -> str | None:
        if self.rotating is None:
            return super().kernel_why_not(prepared)
        return self.parts[self.rotating].kernel_why_not(prepared[self.rotating])

    def on_projection(self, projected: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """The part with the kernel first: what the others do to queries is a factor, which commutes with rotation."""
        if self.rotating is None:
            return super().on_projection(projected, prepared)
        q, k, v = self.parts[self.rotating].on_projection(projected, prepared[self.rotating])
        for index, (part, own) in enumerate(zip(self.parts, prepared, strict=True)):
            if index != self.rotating:
                q, k, v = part.on_heads(q, k, v, own)
        return q, k, v

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Prepared
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        for part, own in zip(self.parts, prepared, strict=True):
            q, k, score_mod = part.on_attention(q, k, mask, score_mod, own)
        return q, k, score_mod

    def on_output(self, y: Tensor, prepared: Prepared) -> Tensor:
        for part, own in zip(self.parts, prepared, strict=True):
            y = part.on_output(y, own)
        return y

    def max_cached_positions(self, window: int | None, like: Tensor) -> int | None:
        found = (part.max_cached_positions(window, like) for part in self.parts)
        return min((most for most in found if most is not None), default=None)

    def length_key(self, length: int) -> Hashable:
        return tuple(part.length_key(length) for part in self.parts)

    def on_scores(self, prepared: Prepared) -> Bias | TokenBias | None:
        found = [part.on_scores(own) for part, own in zip(self.parts, prepared, strict=True)]
        biases = [bias for bias in found if bias is not None]
        if len(biases) > 1:
            return SumOfBiases(tuple(cast(Bias, bias) for bias in biases))  # a bias of sums is the only one
        return biases[0] if biases else None
