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

# What they are, in English and Chinese.
DOCUMENTS = {
    FROM_SCRATCH: {
        "en": "an article that derives attention, sinusoidal and rotary positions step by step",
        "zh": "一篇文章：逐步推导注意力、正弦位置编码和旋转位置编码",
    },
    READING_NOTES: {
        "en": "reading notes of 2024 on “Why Are Sines and Cosines Used For Positional Encoding?” "
        "(mfaizan.github.io) and “Transformer Architecture: The Positional Encoding” (Amirhossein Kazemnejad)",
        "zh": "2024 年的读书笔记，所读为 “Why Are Sines and Cosines Used For Positional Encoding?”（mfaizan.github.io）"
        "和 “Transformer Architecture: The Positional Encoding”（Amirhossein Kazemnejad）",
    },
    ROTARY_EXPLAINED: {
        "en": "notes of a lecture that derives rotary positions from rotations over the reals, with code",
        "zh": "讲座笔记：从实数域上的旋转推导旋转位置编码，并有代码",
    },
    ARCHITECTURE: {
        "en": "a chapter on the structure of the Transformer, its parts and its technical details",
        "zh": "一章教材：Transformer 的整体结构、各个模块与技术细节",
    },
    RELATIVE_POSITIONS: {
        "en": "notes on the positions of “Attention Is All You Need” (Vaswani et al., 2017)",
        "zh": "笔记：“Attention Is All You Need”（Vaswani 等，2017）的位置编码",
    },
}

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
