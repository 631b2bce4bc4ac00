"""The directive `plot`: figures that matplotlib draws when the site is built, once in light colors and once in dark.

The directive of matplotlib itself writes reStructuredText into the page, which pages in Markdown do not read.
"""

import hashlib
import io
import os
import traceback
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
from cycler import cycler
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib import pyplot
from matplotlib.colors import LinearSegmentedColormap
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from sphinx_extensions.colors import COLORS

matplotlib.use("agg")


def style(theme: str) -> dict[str, Any]:
    """The settings of matplotlib in which figures have the colors of the lab."""
    colors = COLORS[theme]
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"))
    lines = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), colors["faint"])
    return {
        **dict.fromkeys(ink, colors["ink"]),
        **lines,
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), colors["card"]),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=[colors[f"c{number}"] for number in range(1, 7)]),
        "axes.titlesize": "medium",
        "figure.constrained_layout.use": True,
        "figure.figsize": (6.4, 3.2),
        "grid.color": colors["line"],
        "image.cmap": f"phasor-{theme}",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "phasor",
    }


def register_colormaps() -> None:
    """The lab's colors from nothing to much, by theme."""
    for theme, colors in COLORS.items():
        steps = [colors[f"seq-{number}"] for number in range(4)]
        matplotlib.colormaps.register(LinearSegmentedColormap.from_list(f"phasor-{theme}", steps), force=True)


def draw(code: str, theme: str) -> list[bytes]:
    """The figures that a block draws, as SVG."""
    pyplot.close("all")
    with matplotlib.rc_context(style(theme)):
        exec(compile(code, "plot", "exec"), {"__name__": "__plot__"})
        found = []
        for number in pyplot.get_fignums():
            file = io.BytesIO()
            pyplot.figure(number).savefig(file, format="svg", metadata={"Date": None})
            found.append(file.getvalue())
    pyplot.close("all")
    return found


class Plot(SphinxDirective):
    """A block of Python whose figures are shown; `alt` says in words what is on them."""

    has_content = True
    option_spec: ClassVar = {
        "alt": directives.unchanged_required,
        "caption": directives.unchanged_required,
        "include-source": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """The figures, below their code if that is asked for."""
        if "alt" not in self.options:
            raise self.error("a plot needs the option 'alt': what is on it, in words")
        code = "\n".join(self.content)
        try:
            drawn = {theme: draw(code, theme) for theme in COLORS}
        except Exception:
            raise self.error(f"the plot cannot be drawn:\n{traceback.format_exc(limit=-1)}") from None
        if not drawn["light"]:
            raise self.error("the plot draws no figure")
        found: list[nodes.Node] = []
        if "include-source" in self.options:
            found.append(nodes.literal_block(code, code, language="python"))
        figure = nodes.figure(classes=["plot"])
        for theme, files in drawn.items():
            figure += [self.image(file, theme) for file in files]
        if "caption" in self.options:
            caption, messages = self.parse_inline(self.options["caption"])
            figure += [nodes.caption(self.options["caption"], "", *caption), *messages]
        return [*found, figure]

    def image(self, svg: bytes, theme: str) -> nodes.image:
        """A figure, written to a file under a name that is made of what it shows."""
        folder = Path(self.env.doctreedir) / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(svg).hexdigest()[:16]}.svg"
        path.write_bytes(svg)
        uri = "/" + Path(os.path.relpath(path, self.env.srcdir)).as_posix()
        return nodes.image(uri=uri, alt=self.options["alt"], classes=[f"only-{theme}"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    register_colormaps()
    app.add_directive("plot", Plot)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
