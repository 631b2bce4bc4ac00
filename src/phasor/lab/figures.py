"""Which view shows what the documents on positions explain: their figures, tables and analogies, each with a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A figure, table or analogy of a document, and the address on the page that shows it.

    `what` and `what_zh` name it in English and Chinese; `url` is a view with its state, such as `#/phasors?q=3`.
    """

    document: str
    what: str
    what_zh: str
    url: str


# The documents, by their titles.
FROM_SCRATCH = "从头理解Transformer及Positional Encoding，RoPE"
READING_NOTES = "Transformer 中的位置编码"
ROTARY_EXPLAINED = "解密旋转位置编码"
ARCHITECTURE = "Transformer：整体结构、模块与技术细节"
RELATIVE_POSITIONS = "Transformer：位置编码"

FIGURES: list[Figure] = []


def show(view: str, figures: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
    """Add what a view shows to the table: by document, and by the state that shows it, its name in English and Chinese.

    Modules of `lab/views` call this when they are imported.

    >>> show("phasors", {"RoPE": {"q=3&k=7": ("two words at a distance", "相距一段距离的两个词")}})
    >>> FIGURES.pop().url
    '#/phasors?q=3&k=7'
    """
    for document, states in figures.items():
        for state, (what, what_zh) in states.items():
            FIGURES.append(Figure(document, what, what_zh, f"#/{view}?{state}" if state else f"#/{view}"))
