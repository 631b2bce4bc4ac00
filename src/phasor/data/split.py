"""Holding out examples for validation, by their text and not by their place.

An example is held out if a hash of its text (of a pair: its source) is below a threshold. The same text is thus
always on the same side, also when the corpus grows later. A corpus of a few long documents has too few of them
for that; it gives the last lines of each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Self

from phasor.data.dates import Split

Example = tuple[str, ...]  # texts
Read = Callable[[], Iterable[Example]]
FULL = 1 << 64


class PlacedExample(tuple[str, ...]):
    """An example that knows its place, a file and a line, for messages about it.

    >>> record = PlacedExample(("a text", "a label"), "texts.jsonl, line 3")
    >>> record == ("a text", "a label"), format_place(record)
    (True, 'texts.jsonl, line 3: ')
    """

    where: str

    def __new__(cls, texts: Iterable[str], where: str) -> Self:
        record = super().__new__(cls, texts)
        record.where = where
        return record


def format_place(example: Example) -> str:
    """The place of an example as the beginning of a message; empty where it is not known."""
    return f"{example.where}: " if isinstance(example, PlacedExample) else ""


class Plan(NamedTuple):
    """How a corpus is split, and how large it is."""

    examples: int
    characters: int
    share: float
    threshold: int
    tails: bool


def plan_split(read: Read, share: float, name: str, holds_out: bool = True) -> Plan:
    """Reads a corpus once, to know its size and that all of it can be read; refuses one that cannot be split."""
    count = characters = 0
    held, least, cuttable = False, FULL, False
    threshold = int(share * FULL) if holds_out else 0
    for example in read():
        count += 1
        characters += sum(map(len, example))
        place = place_of(example)
        held |= place < threshold
        least = min(least, place)
        cuttable |= len(example) == 1 and count * share < 1 and cut_of(example[0], share) is not None
    if count == 0:
        raise ValueError(f"{name} holds no text")
    if not holds_out:
        return Plan(count, characters, share, 0, False)
    if cuttable and count * share < 1:
        return Plan(count, characters, share, 0, True)
    if count == 1:
        raise ValueError(f"{name} holds one example of one line, of which nothing can be held out: give data.valid")
    return Plan(count, characters, share, threshold if held else least + 1, False)


def split(examples: Iterable[Example], plan: Plan) -> Iterator[tuple[Split, Example]]:
    """Every example with the side it is on.

    >>> plan = plan_split(lambda: [("a\\nb\\nc\\n",)], 0.4, "letters")
    >>> list(split([("a\\nb\\nc\\n",)], plan))
    [('train', ('a\\nb\\n',)), ('valid', ('c\\n',))]
    """
    for example in examples:
        cut = cut_of(example[0], plan.share) if plan.tails else None
        if cut is not None:
            yield "train", (example[0][:cut],)
            yield "valid", (example[0][cut:],)
        else:
            yield ("valid" if place_of(example) < plan.threshold else "train"), example


def place_of(example: Example) -> int:
    """A number below 2^64 that depends on the text alone."""
    digest = hashlib.blake2b(example[0].encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def cut_of(text: str, share: float) -> int | None:
    """Where the last lines of a text begin that make up about its share; nothing where both sides would not have text.

    >>> cut_of("one\\ntwo\\nthree\\n", 0.3), cut_of("one line", 0.3)
    (8, None)
    """
    middle = min(math.ceil(len(text) * (1 - share)), len(text.rstrip()) - 1)
    cut = text.rfind("\n", 0, max(0, middle)) + 1
    return cut if text[:cut].strip() and text[cut:].strip() else None
