"""Questions about rotary positions that a comparison answers by experiment: each is a list of variants of rotary."""

from __future__ import annotations

from phasor.config import Extension
from phasor.config.schema import unknown
from phasor.evaluation.compare.schemes import ComparedScheme, parse_schemes

ROTARY = "rotary"
BASES = (100, 1_000, 100_000, 1_000_000)  # beside 10,000, the default


def vary_subspaces(head_dim: int) -> tuple[ComparedScheme, ...]:
    """Fewer rotated pairs: one, an eighth, a quarter and half of those of a head, with frequencies further apart."""
    pairs = head_dim // 2
    fewer = sorted({1, pairs // 8, pairs // 4, pairs // 2} - {0, pairs})
    return tuple(
        ComparedScheme(f"{count} of {pairs} pairs", ROTARY, fields=(("rotary_dim", 2 * count),)) for count in fewer
    )


def vary_base() -> tuple[ComparedScheme, ...]:
    """Other bases."""
    return tuple(ComparedScheme(f"base {base}", ROTARY, fields=(("base", base),)) for base in BASES)


def vary_decay(length: int) -> tuple[ComparedScheme, ...]:
    """More decay with the distance, by xPos or by ALiBi's slopes; slopes alone; and wavelengths too long to decay."""
    slow = Extension.kinds["linear"](factor=length)
    return (
        *parse_schemes("xpos,rotary+alibi,alibi", None),
        ComparedScheme("long wavelengths", ROTARY, fields=(("extension", slow),)),
    )


def question_schemes(question: str, head_dim: int, length: int) -> tuple[ComparedScheme, ...]:
    """What a question compares in heads of that width, trained at a length: rotary as it is, then its variants.

    >>> [scheme.name for scheme in question_schemes("subspaces", 32, 64)]
    ['rotary', '1 of 16 pairs', '2 of 16 pairs', '4 of 16 pairs', '8 of 16 pairs']
    """
    variants = {"subspaces": vary_subspaces(head_dim), "base": vary_base(), "decay": vary_decay(length)}
    if not isinstance(question, str) or question not in variants:
        raise unknown("question", question, variants)
    return (ComparedScheme(ROTARY, ROTARY), *variants[question])
