"""The settings of an evaluation over lengths, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasor.config.schema import check_integer, quote, unknown
from phasor.evaluation.protocols import PROTOCOLS
from phasor.evaluation.variants import BASELINE, LARGEST, PER_LENGTH, check_variants
from phasor.models.extensions import parse_length

TARGETS, STRIDE = 256, 256
BATCH_TOKENS = 16384  # that are read at once, unless one window has more


@dataclass(frozen=True)
class LengthSettings:
    """The checked settings of an evaluation over lengths; `names` are the models compared, the baseline last."""

    lengths: tuple[int, ...]
    names: tuple[str, ...]
    protocol: str
    factor: float | str
    targets: int
    stride: int
    batch_tokens: int

    @property
    def largest(self) -> int:
        return self.lengths[-1]

    def reach(self, length: int, original: int) -> int:
        """The length that an extension is made for, where the model reads `length` tokens."""
        if isinstance(self.factor, str):
            return self.largest if self.factor == LARGEST else length
        return round(original * self.factor)


def check_settings(
    lengths: Sequence[int | str] | str,
    extensions: Sequence[str],
    protocol: str,
    factor: float | str,
    targets: int | None,
    stride: int,
    limit: int | None,
    batch_tokens: int,
) -> LengthSettings:
    """The settings, or the first mistake in a sentence."""
    parsed = parse_lengths(lengths)
    names = [extensions] if isinstance(extensions, str) else list(extensions)
    check_variants(names)
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if isinstance(factor, str) and factor not in (LARGEST, PER_LENGTH):
        raise ValueError(f"--factor is {LARGEST}, {PER_LENGTH} or a number, not {quote(factor)}")
    if not isinstance(factor, str) and not (factor >= 1 and math.isfinite(factor)):
        raise ValueError(f"--factor {factor:g} is below 1: an extension makes a model read further, and not less far")
    for name, value in (("stride", stride), ("limit", limit), ("targets", targets), ("batch_tokens", batch_tokens)):
        if value is not None:
            check_integer(name, value)
    smallest = parsed[0]
    if targets is not None and targets > smallest:
        raise ValueError(f"--targets {targets:,} is more than the smallest length has tokens, {smallest:,}")
    if protocol == "sliding" and stride > smallest:
        raise ValueError(f"--stride {stride:,} is more than the smallest length, {smallest:,}: tokens would be skipped")
    chosen = min(TARGETS, max(1, smallest // 2)) if targets is None else targets
    names = [name for name in dict.fromkeys(names) if name != BASELINE]
    return LengthSettings(parsed, (*names, BASELINE), protocol, factor, chosen, stride, batch_tokens)


def parse_lengths(lengths: Sequence[int | str] | str) -> tuple[int, ...]:
    """Lengths in order, each once; 1k is 1,024 tokens.

    >>> parse_lengths("8k,4k,6000"), parse_lengths([2048, "4k"])
    ((4096, 6000, 8192), (2048, 4096))
    """
    given = lengths.split(",") if isinstance(lengths, str) else lengths
    return tuple(sorted({parse_length(each) for each in given}))
