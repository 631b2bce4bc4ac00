"""The configuration of rotary positions."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from phasor.config.positions import Extension, PositionConfig, RotaryPair
from phasor.config.schema import greater_than_one, quote
from phasor.nn.positions.frequencies import geometric_frequencies
from phasor.nn.positions.rotary.scaling import RotaryScaling

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig

Pairing = Literal["half", "adjacent"]


class RotaryConfig(PositionConfig, kind="rotary"):
    """Rotary (RoPE): each pair of query and key features is rotated by its frequency times the position.

    `rotary_dim` is the number of features that are rotated, by default the whole head. `extension` is a scaling for
    longer contexts. `rotate_values` rotates values too, by the angle alone (an option of RoFormer), and with
    `rotate_output` results are rotated back by the query's, so that values count by their distance (DeepSeek V4).
    """

    base: float = 10000.0
    pairing: Pairing = "half"
    rotary_dim: int | None = None
    extension: RotaryScaling | None = None
    rotate_values: bool = False
    rotate_output: bool = False

    def check(self) -> None:
        greater_than_one(self, "base")
        if self.rotate_output and not self.rotate_values:
            raise ValueError(f"{type(self).__name__}.rotate_output rotates values back: it needs rotate_values")
        if self.rotary_dim is not None:
            check_rotary_dim(self.rotary_dim, f"{type(self).__name__}.rotary_dim")

    @property
    def acts_on(self) -> tuple[str, ...]:
        return ("queries", "keys", "values") if self.rotate_values else ("queries", "keys")

    @property
    def shift_invariant(self) -> bool:
        return self.rotate_output or not self.rotate_values

    @property
    def depends_on_length(self) -> bool:
        return self.extension is not None and self.extension.depends_on_length

    @property
    def extendable(self) -> bool:
        return True

    def with_extension(self, extension: Extension | None) -> Self:
        return self.replace(extension=extension)

    @property
    def compares_extensions(self) -> bool:
        return type(self) is RotaryConfig

    def fold_extension(self, model: ModelConfig) -> Self:
        dim = self.rotary_dim_of(model.rotated_width(self))
        base = None if self.extension is None else self.extension.as_base(self.base, dim)
        return self if base is None else self.replace(extension=None, base=base)

    def without_rotation(self) -> PositionConfig:
        return PositionConfig.from_dict({"kind": "none"})

    def marked_lengths(self) -> tuple[int, ...]:
        original = getattr(self.extension, "original_length", None)
        return () if original is None else (original,)

    def rotary_pairs(self, model: ModelConfig, length: int) -> tuple[RotaryPair, ...]:
        width = self.rotary_dim_of(model.rotated_width(self))
        before = self.replace(extension=None).frequencies(width)
        after = self.frequencies(width, length)
        original = model.original_length(self)
        pairs = []
        for i, (f, g, axis) in enumerate(zip(before, after, self.pair_axes(width), strict=True)):
            slowed = math.inf if g == 0 else float(f / g)
            pairs.append(
                RotaryPair(
                    index=i,
                    axis=axis,
                    frequency=float(f),
                    wavelength=2 * math.pi / float(f),
                    rotations=original * float(f) / (2 * math.pi),
                    extended_frequency=float(g),
                    extended_wavelength=math.inf if g == 0 else 2 * math.pi / float(g),
                    slowed=slowed,
                    effect=describe_effect(slowed),
                )
            )
        return tuple(pairs)

    @property
    def takes_latent_keys(self) -> bool:
        return not self.rotate_values

    def check_model(self, model: ModelConfig) -> None:
        self.rotary_dim_of(model.rotated_width(self))
        attentions = (model.layer(index).attention for index in range(max(1, len(model.layers))))
        if self.rotate_output and any(attention.cap_sinks for attention in attentions):
            raise ValueError(
                f"{type(self).__name__}.rotate_output rotates results by one angle, and cap_sinks gives queries "
                "another position for sink tokens: leave out one of the two"
            )

    def rotary_dim_of(self, head_dim: int) -> int:
        """How many features of a head are rotated; raises ValueError where the head does not allow it.

        >>> RotaryConfig(rotary_dim=32).rotary_dim_of(128)
        32
        """
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        check_rotary_dim(dim, "the rotary dimension of a head")
        if dim > head_dim:
            raise ValueError(f"{type(self).__name__}.rotary_dim is {dim}, wider than the head ({head_dim})")
        self.check_pairs(dim)
        return dim

    def with_defaults(self, head_dim: int) -> Self:
        """The same scheme, with the fields that follow from the width of a head filled in."""
        return self.replace(rotary_dim=self.rotary_dim_of(head_dim))

    def check_pairs(self, rotary_dim: int) -> None:
        """Raise ValueError for a rotary dimension that the scheme or its extension is not defined for."""
        if self.extension is not None:
            self.extension.check_dim(rotary_dim)

    def pair_axes(self, rotary_dim: int) -> tuple[int, ...]:
        """The position row, of those of several axes, that rotates each pair."""
        return (0,) * (rotary_dim // 2)

    def frequencies(self, rotary_dim: int, length: int | None = None) -> list[Decimal]:
        """Radians per position for each pair of a rotary dimension, in high precision.

        >>> [float(f) for f in RotaryConfig().frequencies(4)]
        [1.0, 0.01]
        """
        if self.extension is None:
            return geometric_frequencies(self.base, rotary_dim)
        return self.extension.frequencies(self.base, rotary_dim, length)

    def attention_factor(self, length: int | None = None) -> float:
        return 1.0 if self.extension is None else self.extension.attention_factor(length)

    @property
    def decode_kernel_why_not(self) -> str | None:
        if type(self) is not RotaryConfig or self.rotate_values:
            return "positions have several axes, decay or rotate values"
        return None

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {
            "rotary": cls(),
            "rotary-adjacent": cls(pairing="adjacent"),
            "rotary-partial": cls(rotary_dim=4),
            "rotary-one-pair": cls(rotary_dim=2),
            "rotary-values": cls(pairing="adjacent", rotate_values=True),
            "rotary-output": cls(rotary_dim=4, rotate_values=True, rotate_output=True),
            **{f"rotary-{kind}": cls(extension=scaling.example()) for kind, scaling in RotaryScaling.kinds.items()},
        }


class PiecewiseRotaryConfig(RotaryConfig):
    """Rotary whose distances have several pieces: no extension beside it, and values are not rotated."""

    def check(self) -> None:
        super().check()
        if self.extension is not None or self.rotate_values:
            raise ValueError(
                f"{type(self).__name__} takes neither an extension nor rotate_values: it changes far distances itself"
            )

    @property
    def extendable(self) -> bool:
        return False

    @property
    def takes_latent_keys(self) -> bool:
        return False

    def with_extension(self, extension: Extension | None) -> Self:
        raise ValueError(f"{self.kind!r} positions take no extension: they change far distances themselves")

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        for attention in (model.layer(index).attention for index in range(max(1, len(model.layers)))):
            if attention.cap_sinks or attention.sparse is not None:
                what = f"{type(attention).__name__}.{'cap_sinks' if attention.cap_sinks else 'sparse'}"
                raise ValueError(
                    f"{self.kind!r} positions and {what} both replace the queries for some keys: "
                    "leave out one of the two"
                )


class LearnedRotaryConfig(PositionConfig):
    """Pairs of queries and keys rotated by angles that each layer learns, from those of rotary positions on."""

    base: float = 10000.0
    pairing: Pairing = "half"
    acts_on: ClassVar[tuple[str, ...]] = ("queries", "keys")
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True

    def check(self) -> None:
        greater_than_one(self, "base")

    def check_model(self, model: ModelConfig) -> None:
        if model.head_dim % 2:
            raise ValueError(f"{self.kind!r} positions rotate pairs of features, and a head has {model.head_dim}")

    def frequencies(self, head_dim: int) -> list[Decimal]:
        """Radians per position for each pair, before training."""
        return geometric_frequencies(self.base, head_dim)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {cls.kind: cls(), f"{cls.kind}-adjacent": cls(pairing="adjacent", base=100.0)}


def describe_effect(slowed: float) -> str:
    """What the extension does to a pair, in words.

    >>> describe_effect(1.0), describe_effect(4.0)
    ('kept', 'slowed 4 times')
    """
    if math.isinf(slowed):
        return "stands still"
    if abs(slowed - 1) < 1e-12:
        return "kept"
    return f"slowed {slowed:.4g} times" if slowed > 1 else f"sped up {1 / slowed:.4g} times"


def check_rotary_dim(rotary_dim: int, where: str) -> None:
    if type(rotary_dim) is not int or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"{where} must be even and at least 2, not {quote(rotary_dim)}: features rotate in pairs")
