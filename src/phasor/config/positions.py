"""The position schemes as configurations: what each acts on, its fields, and what holds for it.

The modules that compute them are in `phasor.nn.positions`, one file a scheme.
"""

from __future__ import annotations

from decimal import Decimal
from typing import ClassVar, Literal

from phasor.config.extensions import Extension, Spacing, frequencies
from phasor.config.schema import Choice, not_negative, positive, shown

Pairing = Literal["half", "adjacent"]


class PositionConfig(Choice, what="position scheme"):
    """How a model learns where its tokens stand."""

    @property
    def acts_on(self) -> tuple[str, ...]:
        """Where positions enter: the input, queries, keys, values or scores."""
        return ()

    @property
    def shift_invariant(self) -> bool:
        """Whether a sequence moved as a whole gives the same result."""
        return False

    @property
    def axes(self) -> int:
        """How many position rows a token has: one in text, two in a grid, three in video."""
        return 1

    @property
    def depends_on_length(self) -> bool:
        """Whether the whole sequence's length changes what a token gets."""
        return False

    @property
    def max_positions(self) -> int | None:
        """The number of positions the scheme is defined for; None where there is no end."""
        return None


class NoPositionConfig(PositionConfig, kind="none"):
    """No positions at all (NoPE); a causal mask is the only order there is."""

    shift_invariant: ClassVar[bool] = True


class SinusoidalConfig(PositionConfig, kind="sinusoidal"):
    """Fixed sines and cosines of the position, added to the input or concatenated and projected."""

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    spacing: Spacing = "width"
    offset: int = 0
    zero_padding: bool = False
    combine: Literal["add", "concat"] = "add"
    width: int | None = None
    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        above_one(self.base, "SinusoidalConfig.base")
        positive(self, "width")
        not_negative(self, "offset")
        if self.width is not None and self.combine == "add":
            raise ValueError("SinusoidalConfig.width is for combine='concat'; added codes have the model's width")


class LearnedConfig(PositionConfig, kind="learned"):
    """A table of learned vectors, one a position, added to the input; it ends at its maximum length."""

    max_length: int | None = None
    offset: int = 0
    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        positive(self, "max_length")
        not_negative(self, "offset")

    @property
    def max_positions(self) -> int | None:
        return self.max_length


class CountingConfig(PositionConfig, kind="counting"):
    """The position itself times a learned direction, added to the input: naive, and unbounded."""

    acts_on: ClassVar[tuple[str, ...]] = ("input",)


class NormalizedConfig(PositionConfig, kind="normalized"):
    """t/(n-1) times a learned direction, added to the input: naive, one step means a different distance at each n."""

    acts_on: ClassVar[tuple[str, ...]] = ("input",)

    @property
    def depends_on_length(self) -> bool:
        return True


class T5PositionConfig(PositionConfig, kind="t5"):
    """A learned scalar per head and bucket of distance, added to the scores and shared by all layers."""

    num_buckets: int = 32
    max_distance: int = 128
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise ValueError(f"T5PositionConfig.num_buckets must be a multiple of 4, not {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"T5PositionConfig.max_distance ({self.max_distance}) must be greater than half of "
                f"num_buckets ({self.num_buckets}): those distances have a bucket each"
            )


class ALiBiConfig(PositionConfig, kind="alibi"):
    """A penalty of slope times distance on the scores, slopes geometric over the heads.

    `multiplier` is for all of them: Falcon divides the penalty by sqrt(head_dim) together with the scores.
    """

    max_bias: float = 8.0
    multiplier: float = 1.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "max_bias", "multiplier")


class RotaryConfig(PositionConfig, kind="rotary"):
    """Rotary (RoPE): each pair of query and key features turns by its frequency times the position.

    `values` turns those of values too, by the angle alone (an option of RoFormer).
    """

    base: float = 10000.0
    pairing: Pairing = "half"
    width: int | None = None
    extension: Extension | None = None
    sections: tuple[int, ...] | None = None
    axial: bool = False
    decay: float | None = None
    values: bool = False

    def check(self) -> None:
        above_one(self.base, f"{type(self).__name__}.base")
        positive(self, "decay")
        if self.width is not None:
            check_rotated_width(self.width, f"{type(self).__name__}.width")
        if self.decay is not None and self.axes > 1:
            raise ValueError("xPos decays along one axis: a rotary scheme with decay is not axial and has no sections")
        if self.sections is not None:
            if self.axial:
                raise ValueError("a rotary scheme is axial or has sections, not both")
            if not self.sections or min(self.sections) < 1:
                raise ValueError(f"{type(self).__name__}.sections must be counts of pairs of at least 1 each")

    @property
    def acts_on(self) -> tuple[str, ...]:
        return ("queries", "keys", "values") if self.values else ("queries", "keys")

    @property
    def shift_invariant(self) -> bool:
        return not self.values

    @property
    def axes(self) -> int:
        return 2 if self.axial else len(self.sections) if self.sections else 1

    @property
    def depends_on_length(self) -> bool:
        return self.extension is not None and self.extension.depends_on_length

    @property
    def max_positions(self) -> int | None:
        return None if self.decay is None else min(XPOS_SPAN, int(XPOS_SPAN / 512 * self.decay))

    def section_sizes(self, width: int) -> tuple[int, ...]:
        """How many of the pairs turn with each position row."""
        return (width // 4, width // 4) if self.axial else self.sections or (width // 2,)

    def rotated_width(self, head_dim: int) -> int:
        """How many features of a head turn; raises where they cannot.

        >>> RotaryConfig(width=32).rotated_width(128)
        32
        """
        width = head_dim if self.width is None else self.width
        check_rotated_width(width, "the rotated width of a head")
        if width > head_dim:
            raise ValueError(f"{type(self).__name__}.width is {width}, wider than the head ({head_dim})")
        if self.axial and width % 4:
            raise ValueError(f"axial rotary needs a rotated width divisible by 4, not {width}: half of it an axis")
        sections = self.section_sizes(width)
        if sum(sections) != width // 2 or min(sections) < 1:
            raise ValueError(
                f"{type(self).__name__}.sections {list(sections)} must add up to the {width // 2} pairs of a "
                f"rotated width of {width}, each at least 1"
            )
        if self.extension is not None:
            self.extension.check_width(width // 2 if self.axial else width)
        return width

    def frequencies(self, width: int, length: int | None = None) -> list[Decimal]:
        """Radians per position for each pair of a rotated width, in high precision.

        >>> [float(f) for f in RotaryConfig().frequencies(4)]
        [1.0, 0.01]
        """
        wide = width // 2 if self.axial else width
        if self.extension is None:
            one_axis = frequencies(self.base, wide)
        else:
            one_axis = self.extension.frequencies(self.base, wide, length)
        return one_axis * 2 if self.axial else one_axis

    def attention_factor(self, length: int | None = None) -> float:
        """What turned queries and keys are multiplied by."""
        return 1.0 if self.extension is None else self.extension.attention_factor(length)


class XPosConfig(RotaryConfig, kind="xpos"):
    """Rotary with an exponential decay: queries shrink and keys grow with the position, pair by pair."""

    decay: float | None = 512.0

    def check(self) -> None:
        super().check()
        if self.decay is None:
            raise ValueError("XPosConfig.decay must be a number: without decay the scheme is RotaryConfig")


class AxialConfig(RotaryConfig, kind="axial"):
    """Rotary over a 2-D grid: half of the pairs turn with the row, half with the column."""

    axial: bool = True

    def check(self) -> None:
        super().check()
        if not self.axial:
            raise ValueError("AxialConfig.axial must be true: with one axis the scheme is RotaryConfig")


class MultiSectionConfig(RotaryConfig, kind="mrope"):
    """Multi-section rotary (mRoPE): time, height and width each turn a section of the pairs (1/4, 3/8, 3/8)."""

    def check(self) -> None:
        super().check()
        if self.axial:
            raise ValueError("MultiSectionConfig.axial must be false: a grid of two axes is AxialConfig")

    @property
    def axes(self) -> int:
        return len(self.sections) if self.sections else 3

    def section_sizes(self, width: int) -> tuple[int, ...]:
        pairs = width // 2
        time, height = pairs // 4, (pairs - pairs // 4) // 2
        return self.sections or (time, height, pairs - time - height)


XPOS_SPAN = 32768  # beyond it keys that decay over 512 positions leave float32's range; over fewer, sooner


def above_one(value: float, where: str) -> None:
    if not value > 1:
        raise ValueError(f"{where} must be greater than 1, not {value}")


def check_rotated_width(width: int, where: str) -> None:
    if type(width) is not int or width < 2 or width % 2:
        raise ValueError(f"{where} must be even and at least 2, not {shown(width)}: features turn in pairs")
