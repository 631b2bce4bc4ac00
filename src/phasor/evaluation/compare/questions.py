"""Questions about rotary positions that a comparison answers by experiment: each is a list of variants of rotary."""

from __future__ import annotations

from collections.abc import Callable

from phasor.config import Extension
from phasor.config.schema import unknown
from phasor.evaluation.compare.schemes import ComparedScheme, parse_schemes

ROTARY = "rotary"
BASES = (100, 1_000, 100_000, 1_000_000)  # beside 10,000, the default


def vary_subspaces(head_dim: int, length: int) -> tuple[ComparedScheme, ...]:
    """Fewer rotated pairs: one, an eighth, a quarter and half of those of a head, with frequencies further apart."""
    pairs = head_dim // 2
    fewer = sorted({1, pairs // 8, pairs // 4, pairs // 2} - {0, pairs})
    return tuple(
        ComparedScheme(f"{count} of {pairs} pairs", ROTARY, fields=(("rotary_dim", 2 * count),)) for count in fewer
    )


def vary_base(head_dim: int, length: int) -> tuple[ComparedScheme, ...]:
    """Other bases."""
    return tuple(ComparedScheme(f"base {base}", ROTARY, fields=(("base", base),)) for base in BASES)


def vary_decay(head_dim: int, length: int) -> tuple[ComparedScheme, ...]:
    """More decay with the distance, by xPos or by ALiBi's slopes; decay alone; and wavelengths too long for any."""
    slow = Extension.kinds["linear"](factor=length)
    return (
        *parse_schemes("xpos,rotary+alibi,alibi", None),
        ComparedScheme("long wavelengths", ROTARY, fields=(("extension", slow),)),
    )


QUESTIONS: dict[str, Callable[[int, int], tuple[ComparedScheme, ...]]] = {
    "subspaces": vary_subspaces,
    "base": vary_base,
    "decay": vary_decay,
}


def question_schemes(question: str, head_dim: int, length: int) -> tuple[ComparedScheme, ...]:
    """What a question compares in heads of that width, trained at a length: rotary as it is, then its variants.

    >>> [scheme.name for scheme in question_schemes("subspaces", 32, 64)]
    ['rotary', '1 of 16 pairs', '2 of 16 pairs', '4 of 16 pairs', '8 of 16 pairs']
    """
    if not isinstance(question, str) or question not in QUESTIONS:
        raise unknown("question", question, QUESTIONS)
    return (ComparedScheme(ROTARY, ROTARY), *QUESTIONS[question](head_dim, length))
