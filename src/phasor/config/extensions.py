"""Context extension: each is only another frequency table for rotary positions.

Every formula here runs in 50-digit decimal arithmetic on the host, once, so the frequencies carry no
float rounding into the phases. With `d` the rotated width, the plain frequencies are
`theta_i = base^(-2i/d)`, radians per position.

>>> yarn = YaRN(factor=8.0, original_length=4096)
>>> plain, extended = frequencies(10000.0, 128), yarn.frequencies(10000.0, 128)
>>> float(plain[0] / extended[0]), float(plain[63] / extended[63])
(1.0, 8.0)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from typing import Any, ClassVar, Literal

from phasor.config.schema import Choice, at_least_one, not_negative, positive, shown

PRECISE = Context(prec=50)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def precisely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of decimals with fifty digits, whatever the caller's own decimal context is."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with localcontext(PRECISE):
            return function(*args, **kwargs)

    return run


@precisely
def frequencies(base: float | Decimal, width: int) -> list[Decimal]:
    """`base^(-2i/width)` for each pair `i`, in radians per position.

    >>> [float(f) for f in frequencies(10000.0, 4)]
    [1.0, 0.01]
    """
    ratio = Decimal(base) ** (Decimal(-2) / width)
    return [ratio**i for i in range((width + 1) // 2)]


class Extension(Choice, what="extension"):
    """How rotary frequencies change so that a model reads further than it was trained."""

    depends_on_length: ClassVar[bool] = False

    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        """Radians per position, one for each of the `width / 2` pairs, for a sequence of `length`."""
        raise NotImplementedError(f"{type(self).__name__} does not define its frequencies")

    def attention_factor(self, length: int | None = None) -> float:
        """What `rotate` multiplies queries and keys by."""
        return 1.0

    def check_width(self, width: int) -> None:
        """Raise ValueError for a rotated width that this extension is not defined for."""

    def require_length(self, length: int | None) -> int:
        if length is None:
            raise ValueError(f"the extension {self.kind!r} depends on the sequence's length: pass length=")
        if type(length) is not int or length < 1:
            raise ValueError(f"length must be a whole number of at least 1, not {shown(length)}")
        return length


class LinearScaling(Extension, kind="linear"):
    """Position interpolation (PI): every frequency divided by `factor`."""

    factor: float

    def check(self) -> None:
        at_least_one(self, "factor")

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        return [f / Decimal(self.factor) for f in frequencies(base, width)]


class NTKScaling(Extension, kind="ntk"):
    """NTK-aware: the base grows to `base * factor^(d/(d-2))`; fast pairs stay, the slowest is interpolated."""

    factor: float

    def check(self) -> None:
        at_least_one(self, "factor")

    def check_width(self, width: int) -> None:
        wide_enough(self, width)

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        return frequencies(stretched(base, Decimal(self.factor), width), width)


class DynamicNTKScaling(Extension, kind="dynamic-ntk"):
    """NTK-aware with a base that grows with the sequence once it is longer than `original_length`."""

    factor: float
    original_length: int
    depends_on_length: ClassVar[bool] = True

    def check(self) -> None:
        at_least_one(self, "factor")
        positive(self, "original_length")

    def check_width(self, width: int) -> None:
        wide_enough(self, width)

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        reach = Decimal(max(self.require_length(length), self.original_length)) / self.original_length
        factor = Decimal(self.factor)
        return frequencies(stretched(base, factor * reach - (factor - 1), width), width)


class Ramped(Extension):
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

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        scale = self.scale(length)
        low, high = self.ramp_ends(base, width)
        plain = frequencies(base, width)
        ramp = [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(len(plain))]
        return [f / scale * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    @precisely
    def ramp_ends(self, base: float, width: int) -> tuple[Decimal, Decimal]:
        """The pairs between which the ramp runs: `beta_fast` and `beta_slow` turns within the original length."""

        def pair(turns: float) -> Decimal:
            return width * (self.original_length / (2 * PI * Decimal(turns))).ln() / (2 * Decimal(base).ln())

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
        low, high = max(low, Decimal(0)), min(high, Decimal(width - 1))
        return (low, high + Decimal("0.001")) if low == high else (low, high)

    @precisely
    def attention_factor(self, length: int | None = None) -> float:
        if self.attention is not None:
            return self.attention
        scale = self.scale(length)

        def sharpening(weight: float) -> Decimal:
            return Decimal(1) if scale <= 1 else Decimal("0.1") * Decimal(weight) * scale.ln() + 1

        if self.mscale and self.mscale_all_dim:
            return float(sharpening(self.mscale) / sharpening(self.mscale_all_dim))
        return float(sharpening(1.0))


class YaRN(Ramped, kind="yarn"):
    """YaRN: fast pairs kept, slow pairs interpolated, a ramp between them, and a sharper softmax."""

    factor: float

    def check(self) -> None:
        super().check()
        at_least_one(self, "factor")

    def scale(self, length: int | None) -> Decimal:
        return Decimal(self.factor)


class DynamicYaRN(Ramped, kind="dynamic-yarn"):
    """YaRN with the factor `max(1, length / original_length)`, in its attention factor too."""

    depends_on_length: ClassVar[bool] = True

    @precisely
    def scale(self, length: int | None) -> Decimal:
        return max(Decimal(1), Decimal(self.require_length(length)) / self.original_length)


class Llama3Scaling(Extension, kind="llama3"):
    """Llama 3.1: wavelengths under a bound kept, over another divided, and a smooth passage between."""

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def check(self) -> None:
        at_least_one(self, "factor")
        positive(self, "original_length", "low_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor ({self.high_freq_factor}) must be greater than "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)

        def extend(f: Decimal) -> Decimal:
            turns = self.original_length * f / (2 * PI)
            keep = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
            return f / Decimal(self.factor) * (1 - keep) + f * keep

        return [extend(f) for f in frequencies(base, width)]


class LongRoPE(Extension, kind="longrope"):
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

    def check_width(self, width: int) -> None:
        if len(self.short_factor) != width // 2:
            raise ValueError(
                f"LongRoPE.short_factor has {len(self.short_factor)} entries, but a rotated width of {width} "
                f"has {width // 2} pairs"
            )

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        divisors = self.long_factor if self.require_length(length) > self.original_length else self.short_factor
        return [f / Decimal(e) for f, e in zip(frequencies(base, width), divisors, strict=True)]

    @precisely
    def attention_factor(self, length: int | None = None) -> float:
        if self.attention is not None:
            return self.attention
        if self.factor <= 1:
            return 1.0
        return float((1 + Decimal(self.factor).ln() / Decimal(self.original_length).ln()).sqrt())


class ProportionalScaling(Extension, kind="proportional"):
    """Only the fastest `fraction` of the pairs turns (each divided by `factor`); the rest stand still."""

    fraction: float
    factor: float = 1.0

    def check(self) -> None:
        at_least_one(self, "factor")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"ProportionalScaling.fraction must be in (0, 1], not {self.fraction}")

    @precisely
    def frequencies(self, base: float, width: int, length: int | None = None) -> list[Decimal]:
        turning = int(self.fraction * width // 2)
        return [f / Decimal(self.factor) if i < turning else Decimal(0) for i, f in enumerate(frequencies(base, width))]


def wide_enough(extension: Extension, width: int) -> None:
    if width < 4:
        raise ValueError(
            f"the extension {extension.kind!r} needs a rotated width of at least 4, not {width}: "
            "its base grows by the power d/(d-2)"
        )


def stretched(base: float, scale: Decimal, width: int) -> Decimal:
    """The base whose slowest frequency is `1/scale` of the one before, the fastest unchanged."""
    return Decimal(base) * scale ** (Decimal(width) / (width - 2))


Spacing = Literal["width", "ends"]


@precisely
def spaced(base: float, width: int, spacing: Spacing) -> list[Decimal]:
    """Frequencies of the sinusoidal table: `base^(-2i/width)`, or from 1 to exactly 1/base ("ends")."""
    if spacing == "width":
        return frequencies(base, width)
    pairs = width // 2
    ratio = Decimal(base) ** (Decimal(-1) / (pairs - 1)) if pairs > 1 else Decimal(1)
    return [ratio**i for i in range(pairs)]
