"""Retrieval tasks: what is hidden in a long text, what is asked about it, and what is the right answer.

`needle`, `multikey` and `variables` are those of RULER (Hsieh et al., 2024), `passkey` is that of Landmark Attention
(Mohtashami and Jaggi, 2023), which Position Interpolation and PoSE were tested with too.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from phasor.config.schema import unknown
from phasor.data import recall

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEYS = 4  # of `multikey`
HOPS = 4  # of `variables`: assignments after the first one
NAMES = """
amber anchor apple arrow autumn badge bamboo basket beacon bridge bronze butter cabin candle canvas carpet castle cedar
cherry cliff clover cobalt copper coral cotton crystal dagger daisy desert diamond dolphin dragon eagle ember engine
falcon feather fern flame forest fossil garden ginger glacier granite hammer harbor hazel honey island ivory jacket
jasper jungle kettle lantern lemon lily magnet maple marble meadow mirror monkey nickel oasis olive orange orchid oyster
paddle palace pearl pepper pigeon pillow planet pocket prairie quartz rabbit ribbon river rocket saddle saffron salmon
shadow silver sparrow spring summit sunset teapot temple thunder tiger timber tulip tunnel turtle valley velvet violin
walnut whale willow window winter
"""  # two of them are a key


@dataclass(frozen=True)
class RetrievalSample:
    """One prompt: `intro`, a haystack with the `needles` in it, `question`, and the `answer` to it.

    The first needle is the one at the depth that is asked for. The `others` are anywhere, or evenly between it and the
    end of the haystack, in their order.
    """

    intro: str
    needles: tuple[str, ...]
    question: str
    answer: str
    others: Literal["anywhere", "after"] = "anywhere"


@dataclass(frozen=True)
class RetrievalTask:
    """A task by its name: one line about it, how a sample is drawn, and the text its haystack repeats."""

    name: str
    summary: str
    draw: Callable[[random.Random], RetrievalSample]
    filler: str = FILLER


def find_tasks(names: list[str]) -> list[RetrievalTask]:
    """Tasks by their names, each once.

    >>> [task.name for task in find_tasks(["needle", "passkey", "needle"])]
    ['needle', 'passkey']
    """
    for name in names:
        if name not in TASKS:
            raise unknown("retrieval task", name, TASKS)
    return [TASKS[name] for name in dict.fromkeys(names)]


def passkey(draw: random.Random) -> RetrievalSample:
    """A number of five digits.

    >>> passkey(random.Random(0)).needles
    (' The pass key is 60494. Remember it. 60494 is the pass key.',)
    """
    key = f"{draw.randrange(10_000, 100_000)}"
    return RetrievalSample(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there.",
        (f" The pass key is {key}. Remember it. {key} is the pass key.",),
        " What is the pass key? The pass key is",
        f" {key}",
    )


def needle(draw: random.Random, keys: int = 1) -> RetrievalSample:
    """A number of seven digits for each of some keys, one of which is asked for."""
    words = draw.sample(NAMES.split(), 2 * keys)
    names = [f"{first}-{second}" for first, second in zip(words[::2], words[1::2], strict=True)]
    values = [f"{draw.randrange(1_000_000, 10_000_000)}" for _ in names]
    return RetrievalSample(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n",
        tuple(
            f" One of the special magic numbers for {name} is: {value}."
            for name, value in zip(names, values, strict=True)
        ),
        f"\nWhat is the special magic number for {names[0]} mentioned in the provided text? The special magic number "
        f"for {names[0]} mentioned in the provided text is",
        f" {values[0]}",
    )


def multikey(draw: random.Random) -> RetrievalSample:
    """The same with three other keys.

    >>> sample = multikey(random.Random(0))
    >>> len(sample.needles), sample.answer.strip() in sample.needles[0]
    (4, True)
    """
    return needle(draw, KEYS)


def variables(draw: random.Random) -> RetrievalSample:
    """A value that passes from variable to variable.

    >>> variables(random.Random(0)).needles[:2]
    (' VAR VTKGN = 23199.', ' VAR KUHMP = VAR VTKGN.')
    """
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=5))
        names += [] if name in names else [name]
    value = draw.randrange(10_000, 100_000)
    later = [f" VAR {new} = VAR {old}." for old, new in pairwise(names)]
    return RetrievalSample(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n",
        (f" VAR {names[0]} = {value}.", *later),
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(names)} variables are assigned the value "
        f"{value}, they are:",
        f" {', '.join(names)}",
        others="after",
    )


def recall_pair(draw: random.Random) -> RetrievalSample:
    """A letter with its digit among others, as in the texts that `phasor train recall` trains with.

    >>> recall_pair(random.Random(0)).needles[:2]
    ('.M7', '.Y6')
    """
    pairs = recall.draw_pairs(draw)
    key, value = pairs[0]
    needles = tuple(recall.FILLER + one + other for one, other in pairs)
    return RetrievalSample("", needles, recall.MARK + key, value)


TASKS = {
    task.name: task
    for task in (
        RetrievalTask("passkey", "a number of five digits, asked for at the end", passkey),
        RetrievalTask("needle", "the number of one key (RULER, single)", needle),
        RetrievalTask("multikey", "the number of one of four keys (RULER, multi-key)", multikey),
        RetrievalTask("variables", "all variables that a value is passed on to (RULER, variable tracking)", variables),
        RetrievalTask(
            "recall", "the digit that was paired with a letter (phasor train recall)", recall_pair, recall.FILLER
        ),
    )
}
