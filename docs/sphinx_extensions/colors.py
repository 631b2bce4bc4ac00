"""The colors of the lab, which the site and its figures share."""

import re
from pathlib import Path

STYLE = Path(__file__).parents[2] / "src" / "phasor" / "lab" / "page" / "style.css"


def read_colors() -> dict[str, dict[str, str]]:
    """The colors of style.css by theme and name."""
    text = STYLE.read_text(encoding="utf-8")
    found = {}
    for theme, start in (("light", ":root {"), ("dark", ':root[data-theme="dark"] {')):
        block = text[text.index(start) :].partition("}")[0]
        found[theme] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    return found


COLORS = read_colors()
