"""One HTML page that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Self

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f7f7f5; color: #1d1d1f; font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.summary { color: #555; }
.wide { overflow-x: auto; background: #fff; border: 1px solid #ddd; border-radius: 6px; margin: .75rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; padding: .6rem .8rem; color: #555; }
th, td { text-align: left; padding: .4rem .8rem; border-top: 1px solid #eee; vertical-align: top; }
th { background: #fafafa; font-weight: 600; }
th, .number { white-space: nowrap; }
.number { text-align: right; }
figure { margin: .75rem 0; }
figure svg, figure img { display: block; max-width: 100%; min-width: 36rem; height: auto; margin: 0 auto; }
figcaption { color: #555; font-size: .92rem; }
pre { overflow-x: auto; background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: .75rem .9rem;
      font: .88rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
li { margin: .2rem 0; }
"""


class Page:
    """A page that grows block by block; every method returns the page.

    Texts are escaped; figures are SVG as text, as `to_svg` gives it.

    >>> page = Page("Loss by length", "a small model").heading("Losses").table(["length", "loss"], [["4k", 2.5]])
    >>> "<td class=\\"number\\">2.5</td>" in page.html()
    True
    """

    def __init__(self, title: str, summary: str = "") -> None:
        self.title, self.blocks = title, [f"<h1>{escape(title)}</h1>"]
        if summary:
            self.blocks.append(f'<p class="summary">{escape(summary)}</p>')

    def heading(self, text: str) -> Self:
        """Begin a section."""
        return self._add(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> Self:
        """A paragraph of text."""
        return self._add(f"<p>{escape(text)}</p>")

    def bullets(self, lines: Sequence[str]) -> Self:
        """A list of short lines."""
        return self._add(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>") if lines else self

    def code(self, text: str) -> Self:
        """Text as it was typed, such as a command."""
        return self._add(f"<pre>{escape(text)}</pre>")

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Self:
        """A table; a column whose cells are numbers is aligned to the right.

        Numbers that are formatted already count as such when they begin with a digit or a sign.
        """
        right = [all(is_number(row[column]) for row in rows) for column in range(len(heads))]
        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        head = "".join(cell("th", text, side) for text, side in zip(heads, right, strict=True))
        body = "".join(
            f"<tr>{''.join(cell('td', text, side) for text, side in zip(row, right, strict=True))}</tr>" for row in rows
        )
        return self._add(
            f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def figure(self, svg: str, caption: str) -> Self:
        """A chart; on a narrow screen it scrolls instead of shrinking."""
        chart = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
        return self._add(f'<figure><div class="wide">{chart}</div><figcaption>{escape(caption)}</figcaption></figure>')

    def provenance(self, values: Mapping[str, Any]) -> Self:
        """How to get these numbers again: the command, versions, device and seeds, as `provenance` collects them."""
        self.heading("How to get these numbers again")
        if values.get("command"):
            self.code(str(values["command"]))
        rows = [(name.replace("_", " "), value) for name, value in values.items() if name != "command"]
        return self.table(["what", "value"], rows)

    def html(self) -> str:
        """The page as one file."""
        blocks = "\n".join(self.blocks)
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
            f"<body>\n<main>\n{blocks}\n</main>\n</body>\n</html>\n"
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
    return f"<{tag}{mark}>{escape(str(value))}</{tag}>"


def is_number(value: Any) -> bool:
    """
    >>> is_number(3), is_number("-0.2 [-0.3, -0.1]"), is_number("yarn"), is_number("4k")
    (True, True, False, True)
    """
    return isinstance(value, int | float) or str(value).lstrip("-+\N{MINUS SIGN}")[:1].isdecimal()
