"""Rotary scaling for longer contexts: each scaling is another frequency table for rotary positions (no torch).

Every formula here runs in 50-digit decimal arithmetic on the host, once, so the frequencies carry no
float rounding into the phases. With `d` the rotary dimension, the plain frequencies are
`theta_i = base^(-2i/d)`, radians per position.

>>> yarn = YaRN(factor=8.0, original_length=4096)
>>> plain, scaled = geometric_frequencies(10000.0, 128), yarn.frequencies(10000.0, 128)
>>> float(plain[0] / scaled[0]), float(plain[63] / scaled[63])
(1.0, 8.0)
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Self

from phasor.config.positions import Extension
from phasor.config.schema import at_least_one, check_integer, names, not_negative, positive
from phasor.nn.positions.frequencies import PI, geometric_frequencies, high_precision

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class RotaryScaling(Extension):
    """How rotary frequencies change so that a model reads further than it was trained."""

    has_end: ClassVar[bool] = True  # whether it reaches `factor` times the original length, and no further

    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        """Radians per position, one for each of the `dim / 2` pairs, for a sequence of `length`."""
        raise NotImplementedError(f"{type(self).__name__} does not define its frequencies")

    def attention_factor(self, length: int | None = None) -> float:
        """What `rotate` multiplies queries and keys by."""
        return 1.0

    def as_base(self, base: float, dim: int) -> float | None:
        """The base whose plain frequencies are those of this scaling, where there is one."""
        return None

    def check_dim(self, dim: int) -> None:
        """Raise ValueError for a rotary dimension that this scaling is not defined for."""

    @classmethod
    def fields_for(cls, model: ModelConfig, factor: float, original: int) -> dict[str, Any]:
        """
        >>> from phasor import preset
        >>> YaRN.fields_for(preset("llama-2"), 4.0, 4096), DynamicNTKScaling.fields_for(preset("llama-2"), 4.0, 4096)
        ({'factor': 4.0}, {'factor': 1.0})
        """
        return {"factor": factor if cls.has_end else 1.0} if "factor" in names(cls) else {}

    def extended_length(self, trained: int) -> int:
        """`factor` times the original length; one that depends on the length starts there and has no end.

        >>> YaRN(factor=4.0, original_length=4096).extended_length(4096), LinearScaling(factor=2.0).extended_length(512)
        (16384, 1024)
        """
        original = getattr(self, "original_length", trained)
        return round(getattr(self, "factor", 1.0) * original) if self.has_end else original

    def trained_length(self, extended: int) -> int:
        original = getattr(self, "original_length", None)
        return max(1, round(extended / getattr(self, "factor", 1.0))) if original is None else original

    def require_length(self, length: int | None) -> int:
        if length is None:
            raise ValueError(f"the extension {self.kind!r} depends on the sequence's length: pass length=")
        return check_integer("length", length)


class LinearScaling(RotaryScaling, kind="linear"):
    """Position interpolation (PI): every frequency divided by `factor`."""

    factor: float

    def check(self) -> None:
        at_least_one(self, "factor")

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        return [f / Decimal(self.factor) for f in geometric_frequencies(base, dim)]

    @classmethod
    def example(cls) -> Self:
        return cls(factor=4.0)


class NTKScaling(RotaryScaling, kind="ntk"):
    """NTK-aware: the base grows to `base * factor^(d/(d-2))`; fast pairs stay, the slowest is interpolated."""

    factor: float

    def check(self) -> None:
        at_least_one(self, "factor")

    def check_dim(self, dim: int) -> None:
        check_ntk_dim(self, dim)

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        return geometric_frequencies(ntk_base(base, Decimal(self.factor), dim), dim)

    def as_base(self, base: float, dim: int) -> float:
        return float(ntk_base(base, Decimal(self.factor), dim))

    @classmethod
    def example(cls) -> Self:
        return cls(factor=4.0)


class DynamicNTKScaling(RotaryScaling, kind="dynamic-ntk"):
    """NTK-aware with a base that grows with the sequence once it is longer than `original_length`."""

    factor: float
    original_length: int
    depends_on_length: ClassVar[bool] = True
    has_end: ClassVar[bool] = False

    def check(self) -> None:
        at_least_one(self, "factor")
        positive(self, "original_length")

    def check_dim(self, dim: int) -> None:
        check_ntk_dim(self, dim)

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        reach = Decimal(max(self.require_length(length), self.original_length)) / self.original_length
        factor = Decimal(self.factor)
        return geometric_frequencies(ntk_base(base, factor * reach - (factor - 1), dim), dim)

    @classmethod
    def example(cls) -> Self:
        return cls(factor=4.0, original_length=8)


class RampScaling(RotaryScaling):
    """What YaRN and its dynamic form share: a ramp over the pairs, and a sharper softmax."""

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def check(self) -> None:
        positive(self, "original_length", "beta_fast", "beta_slow", "attention")
        not_negative(self, "mscale", "mscale_all_dim")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"{type(self).__name__}.beta_fast ({self.beta_fast}) must be greater than beta_slow ({self.beta_slow})"
            )

    def scale(self, length: int | None) -> Decimal:
        """How far the positions are stretched."""
        raise NotImplementedError(f"{type(self).__name__} does not define its scale")

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        scale = self.scale(length)
        low, high = self.ramp_ends(base, dim)
        plain = geometric_frequencies(base, dim)
        ramp = [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(len(plain))]
        return [f / scale * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    @high_precision
    def ramp_ends(self, base: float, dim: int) -> tuple[Decimal, Decimal]:
        """The pairs between which the ramp runs: `beta_fast` and `beta_slow` rotations in the original length."""

        def pair(rotations: float) -> Decimal:
            return dim * (self.original_length / (2 * PI * Decimal(rotations))).ln() / (2 * Decimal(base).ln())

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
        low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
        return (low, high + Decimal("0.001")) if low == high else (low, high)

    @high_precision
    def attention_factor(self, length: int | None = None) -> float:
        if self.attention is not None:
            return self.attention
        if self.mscale and self.mscale_all_dim:
            return float(self.sharpening(self.mscale, length) / self.sharpening(self.mscale_all_dim, length))
        return float(self.sharpening(1.0, length))

    def sharpening(self, weight: float, length: int | None = None) -> Decimal:
        """How much sharper attention gets for how far positions are stretched."""
        scale = self.scale(length)
        return Decimal(1) if scale <= 1 else Decimal("0.1") * Decimal(weight) * scale.ln() + 1


class YaRN(RampScaling, kind="yarn"):
    """YaRN: fast pairs kept, slow pairs interpolated, a ramp between them, and a sharper softmax."""

    factor: float

    def check(self) -> None:
        super().check()
        at_least_one(self, "factor")

    def scale(self, length: int | None) -> Decimal:
        return Decimal(self.factor)

    @classmethod
    def example(cls) -> Self:
        return cls(factor=4.0, original_length=64)


class DynamicYaRN(RampScaling, kind="dynamic-yarn"):
    """YaRN with the factor `max(1, length / original_length)`, in its attention factor too."""

    depends_on_length: ClassVar[bool] = True
    has_end: ClassVar[bool] = False

    @high_precision
    def scale(self, length: int | None) -> Decimal:
        return max(Decimal(1), Decimal(self.require_length(length)) / self.original_length)

    @classmethod
    def example(cls) -> Self:
        return cls(original_length=8)


class Llama3Scaling(RotaryScaling, kind="llama3"):
    """Llama 3.1: wavelengths under a bound kept, over another divided, and a smooth passage between.

    Where both factors are equal there is one bound and nothing between (Llama 4).
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def check(self) -> None:
        at_least_one(self, "factor")
        positive(self, "original_length", "low_freq_factor")
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor ({self.high_freq_factor}) must be at least "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)

        def extend(f: Decimal) -> Decimal:
            rotations = self.original_length * f / (2 * PI)
            passage = (rotations - low) / (high - low) if high > low else rotations - low > 0
            keep = min(max(Decimal(passage), Decimal(0)), Decimal(1))
            return f / Decimal(self.factor) * (1 - keep) + f * keep

        return [extend(f) for f in geometric_frequencies(base, dim)]

    @classmethod
    def example(cls) -> Self:
        return cls(factor=8.0, original_length=64)


class LongRoPE(RotaryScaling, kind="longrope"):
    """LongRoPE: a searched divisor for each pair, one list up to the original length and one beyond it."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float
    attention: float | None = None
    depends_on_length: ClassVar[bool] = True

    def check(self) -> None:
        at_least_one(self, "factor")
        positive(self, "attention")
        if self.original_length < 2:
            raise ValueError(f"LongRoPE.original_length must be at least 2, not {self.original_length}")
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRoPE.short_factor has {len(self.short_factor)} entries and long_factor "
                f"{len(self.long_factor)}: each needs one for every rotated pair"
            )
        if min((*self.short_factor, *self.long_factor), default=1.0) <= 0:
            raise ValueError("LongRoPE.short_factor and long_factor must be greater than 0 everywhere")

    def check_dim(self, dim: int) -> None:
        if len(self.short_factor) != dim // 2:
            raise ValueError(
                f"LongRoPE.short_factor has {len(self.short_factor)} entries, but a rotary dimension of {dim} "
                f"has {dim // 2} pairs"
            )

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        divisors = self.long_factor if self.require_length(length) > self.original_length else self.short_factor
        return [f / Decimal(e) for f, e in zip(geometric_frequencies(base, dim), divisors, strict=True)]

    @high_precision
    def attention_factor(self, length: int | None = None) -> float:
        if self.attention is not None:
            return self.attention
        if self.factor <= 1:
            return 1.0
        return float((1 + Decimal(self.factor).ln() / Decimal(self.original_length).ln()).sqrt())

    @classmethod
    def fields_for(cls, model: ModelConfig, factor: float, original: int) -> dict[str, Any]:
        """The divisors of each pair: 1 up to the original length, and those of YaRN's ramp beyond it.

        >>> from phasor import preset
        >>> LongRoPE.fields_for(preset("llama-2"), 4.0, 4096)["long_factor"][::63]
        (1.0, 4.0)
        """
        position: Any = next(part for part in model.extendable_position().parts if part.extendable)
        dim = position.replace(extension=None).rotary_dim_of(model.rotated_width(position))
        plain = geometric_frequencies(position.base, dim)
        scaled = YaRN(factor=factor, original_length=original).frequencies(position.base, dim)
        long = tuple(float(f / g) for f, g in zip(plain, scaled, strict=True))
        return super().fields_for(model, factor, original) | {
            "short_factor": (1.0,) * len(long),
            "long_factor": long,
        }

    @classmethod
    def example(cls) -> Self:
        return cls(short_factor=(1.0, 1.1, 1.3, 1.5), long_factor=(1.0, 2.0, 3.5, 6.0), original_length=8, factor=4.0)


class ProportionalScaling(RotaryScaling, kind="proportional"):
    """Only the fastest `fraction` of the pairs rotates (each divided by `factor`); the rest stand still."""

    fraction: float
    factor: float = 1.0

    def check(self) -> None:
        at_least_one(self, "factor")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"ProportionalScaling.fraction must be in (0, 1], not {self.fraction}")

    @high_precision
    def frequencies(self, base: float, dim: int, length: int | None = None) -> list[Decimal]:
        rotating = int(self.fraction * dim // 2)
        return [
            f / Decimal(self.factor) if i < rotating else Decimal(0)
            for i, f in enumerate(geometric_frequencies(base, dim))
        ]

    @classmethod
    def example(cls) -> Self:
        return cls(fraction=0.5, factor=2.0)


def check_ntk_dim(scaling: RotaryScaling, dim: int) -> None:
    if dim < 4:
        raise ValueError(
            f"the extension {scaling.kind!r} needs a rotary dimension of at least 4, not {dim}: "
            "its base grows by the power d/(d-2)"
        )


def ntk_base(base: float, scale: Decimal, dim: int) -> Decimal:
    """The base whose slowest frequency is `1/scale` of the one before, the fastest unchanged."""
    return Decimal(base) * scale ** (Decimal(dim) / (dim - 2))
