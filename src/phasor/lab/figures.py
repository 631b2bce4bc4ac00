"""Which view shows what the documents on positions explain: their figures, tables and analogies, each with a link."""

from __future__ import annotations

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


def show(view: str, document: str, what: str, what_zh: str, state: str = "") -> None:
    """Add a link to the table; modules of `lab/views` call this when they are imported.

    >>> show("phasors", "RoPE", "two words at a distance", "相距一段距离的两个词", "q=3&k=7")
    >>> FIGURES.pop().url
    '#/phasors?q=3&k=7'
    """
    FIGURES.append(Figure(document, what, what_zh, f"#/{view}?{state}" if state else f"#/{view}"))
