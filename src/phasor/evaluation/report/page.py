"""One HTML page in English and Chinese, light and dark, that needs no network and no other file."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple, Self

from phasor.evaluation.report.chinese import PROVENANCE, TABLE_HEADS

LANGUAGES = ("en", "zh-CN")


class Text(NamedTuple):
    """A text in both languages; as a string it is the English one.

    >>> f"{Text('loss', '损失')}"
    'loss'
    """

    en: str
    zh: str

    def __str__(self) -> str:
        return self.en


def read_file(name: str) -> str:
    return (resources.files("phasor") / name).read_text(encoding="utf-8")


@functools.cache
def theme() -> str:
    """The colors and fonts of the lab, light and dark: the variables of its style sheet."""
    style = read_file("lab/page/style.css")
    return "\n".join(re.findall(r"^:root.*?^\}", style, flags=re.MULTILINE | re.DOTALL))


def light_color(name: str) -> str:
    """A color of the light theme.

    >>> light_color("c1")
    '#0072b2'
    """
    return re.findall(rf"--{name}: (#\w+);", theme())[0]


def render_code(text: str) -> str:
    """HTML of a text, in which what stands between backticks is code.

    >>> render_code("`a < b`")
    '<code>a &lt; b</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def mark_up(text: Text | Any, tag: str = "span", render: Callable[[str], str] = render_code) -> str:
    """HTML of a text in both languages, of which the page shows one; of a text that is the same in both as it is.

    >>> mark_up("a < b"), mark_up(Text("loss", "损失"))
    ('a &lt; b', '<span lang="en">loss</span><span lang="zh-CN">损失</span>')
    """
    if not isinstance(text, Text):
        return escape(str(text))
    return "".join(
        f'<{tag} lang="{language}">{render(each)}</{tag}>' for language, each in zip(LANGUAGES, text, strict=True)
    )


class Page:
    """A page that grows block by block; every method returns the page.

    Texts are in both languages (`Text`) or the same in both, and are escaped. The title is what was found. Figures are
    SVG as text, as `to_svg` gives it.

    >>> page = Page("Loss by length", "a small model").heading("Losses").table(["length", "loss"], [["4k", 2.5]])
    >>> "<td class=\\"number\\">2.5</td>" in page.html()
    True
    """

    def __init__(self, title: Text | str, summary: Text | str = "") -> None:
        self.title, self.blocks = title, [f"<h1>{mark_up(title)}</h1>"]
        if summary:
            self.blocks.append(f'<p class="lead">{mark_up(summary)}</p>')

    def heading(self, text: Text | str) -> Self:
        """Begin a section."""
        return self._add(f"<h2>{mark_up(text)}</h2>")

    def paragraph(self, text: Text | str) -> Self:
        """A paragraph of text."""
        return self._add(f"<p>{mark_up(text)}</p>")

    def bullets(self, lines: Iterable[Text | str]) -> Self:
        """A list of short lines."""
        items = "".join(f"<li>{mark_up(line)}</li>" for line in lines)
        return self._add(f"<ul>{items}</ul>") if items else self

    def code(self, text: str) -> Self:
        """Text as it was typed, such as a command."""
        return self._add(f"<pre>{escape(text)}</pre>")

    def table(self, heads: Sequence[Text | str], rows: Sequence[Sequence[Any]], caption: Text | str = "") -> Self:
        """A table; a column whose cells are numbers is aligned to the right, unless it is the first.

        Numbers that are formatted already count as such when they begin with a digit or a sign.
        """
        right = [column > 0 and all(is_number(row[column]) for row in rows) for column in range(len(heads))]
        title = f"<caption>{mark_up(caption)}</caption>" if caption else ""
        named = [Text(text, TABLE_HEADS[text]) if text in TABLE_HEADS else text for text in heads]
        head = "".join(cell("th", text, side) for text, side in zip(named, right, strict=True))
        body = "".join(
            f"<tr>{''.join(cell('td', text, side) for text, side in zip(row, right, strict=True))}</tr>" for row in rows
        )
        return self._add(
            f'<div class="wide" tabindex="0"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            "</div>"
        )

    def figure(self, svg: str, caption: Text | str) -> Self:
        """A chart as wide as the page; on a narrow screen it scrolls instead of shrinking."""
        number = sum(block.startswith("<figure") for block in self.blocks)
        chart = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-labelledby="caption-{number}" ', 1)
        return self._add(
            f'<figure><figcaption id="caption-{number}">{mark_up(caption)}</figcaption>'
            f'<div class="wide" tabindex="0">{chart}</div></figure>'
        )

    def provenance(self, values: Mapping[str, Any]) -> Self:
        """How to get these numbers again: the command, versions, device and seeds, as `provenance` collects them."""
        self.heading(Text("How to get these numbers again", "如何重现这些数字"))
        if values.get("command"):
            self.code(str(values["command"]))
        rows = [
            (Text(name.replace("_", " "), PROVENANCE[name]) if name in PROVENANCE else name, value)
            for name, value in values.items()
            if name != "command"
        ]
        return self.table(["what", "value"], rows)

    def html(self) -> str:
        """The page as one file."""
        title = self.title.en if isinstance(self.title, Text) else self.title
        blocks = "\n".join(self.blocks)
        style, script = (read_file(f"evaluation/report/page.{kind}") for kind in ("css", "js"))
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{theme()}\n{style}</style>\n</head>\n"
            f"<body>\n<header><b>phasor</b> <i>{mark_up(Text('report', '报告'))}</i>"
            f"<button>{mark_up(Text('中文', 'English'))}</button>"
            f"<button>{mark_up(Text('Light or dark', '浅色或深色'))}</button></header>\n"
            f"<main>\n{blocks}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
        )

    def _add(self, block: str) -> Self:
        self.blocks.append(block)
        return self


def cell(tag: str, value: Any, right: bool) -> str:
    """
    >>> cell("td", "a < b", False)
    '<td>a &lt; b</td>'
    """
    mark = ' class="number"' if right else ""
    return f"<{tag}{mark}>{mark_up(value)}</{tag}>"


def is_number(value: Any) -> bool:
    """
    >>> is_number(3), is_number("-0.2 [-0.3, -0.1]"), is_number("yarn"), is_number("4k")
    (True, True, False, True)
    """
    return str(value).lstrip("-+\N{MINUS SIGN}")[:1].isdecimal()
