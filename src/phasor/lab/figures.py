"""Which view shows what the documents on positions explain: their figures, tables and analogies, each with a link."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A figure, table or analogy of a document, and the address on the page that shows it.

    `what` and `what_zh` name it in English and Chinese; `url` is a view with its state, such as `#/phasors?q=3`.
    """

    document: str
    what: str
    what_zh: str
    url: str


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
DOCUMENTS = {title: {language: about[language] for language in ("en", "zh")} for title, about in TABLE.items()}
FIGURES = [
    Figure(title, what, what_zh, url)
    for title, about in TABLE.items()
    for url, (what, what_zh) in about["figures"].items()
]
