"""Charts of reports, drawn by matplotlib: curves with intervals, as PNG and as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from phasor.distribution import missing_package
from phasor.evaluation.report.page import Text, light_color, mark_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors of the lab's theme by name: told apart by color-blind readers too.
COLORS = ("c1", "c2", "c3", "c4", "c5", "soft")
PAINTED = (*COLORS, "ink", "faint", "line", "paper")
BAR_GAP, BAR_SPREAD = 2.5, 18  # points between the bars of two curves, and at most between all of them
FAR = 3  # interquartile ranges above the third quartile from which on a dot stands at the edge (Tukey's "far out")
STYLES = (("-", "o"), ("-.", "s"), (":", "^"))  # line and marker, one for each time that the colors are used up


@dataclass(frozen=True)
class Curve:
    """A named curve; `low` and `high` are the ends of its intervals. `baseline` draws it black and dashed."""

    name: Text | str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    baseline: bool = False


@dataclass(frozen=True)
class Dot:
    """A row of a dot plot: two values of a name; `low` and `high` are how far the second one spreads."""

    name: str
    start: float
    end: float
    low: float | None = None
    high: float | None = None
    baseline: bool = False


class Chart:
    """A figure of matplotlib in the colors of the light theme, and its texts that a page shows in Chinese too."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.texts: dict[str, Text] = {}

    def english(self, text: Text | str) -> str:
        """What matplotlib draws of a text."""
        if isinstance(text, Text):
            self.texts[text.en] = text
            return text.en
        return text

    def axes(self, x_label: Text | str, y_label: Text | str, title: Text | str) -> Axes:
        """The panel of a figure that has one."""
        ink, soft = light_color("ink"), light_color("soft")
        axes = self.figure.add_subplot()
        axes.set_xlabel(self.english(x_label), color=ink, fontsize=11)
        axes.set_ylabel(self.english(y_label), color=ink, fontsize=11)
        axes.set_title(self.english(title), loc="left", fontsize=12, color=ink)
        axes.tick_params(colors=soft, labelcolor=ink, labelsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(soft)
        axes.set_facecolor("none")
        axes.set_axisbelow(True)
        return axes


def check_charts() -> None:
    """Raise ValueError where charts cannot be drawn; called before the long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_package("a report needs the package matplotlib", "plot") from None


def draw_curves(
    curves: Sequence[Curve],
    *,
    x_label: Text | str,
    y_label: Text | str,
    title: Text | str = "",
    x_ticks: Sequence[tuple[float, str]] | None = None,
    log_x: bool = False,
    markers: bool = True,
    vertical: tuple[float, Text | str] | None = None,
) -> Chart:
    """Curves in one panel, with their intervals as bars; `vertical` is a named line, such as the trained length."""
    from matplotlib.transforms import ScaledTranslation

    chart = Chart(11, 5)
    axes = chart.axes(x_label, y_label, title)
    figure = chart.figure
    if log_x:
        axes.set_xscale("log", base=2)
    looks = cycle((color, *style) for style in STYLES for color in COLORS)
    gap = min(BAR_GAP, BAR_SPREAD / max(1, len(curves) - 1))
    for index, curve in enumerate(curves):
        color, line, marker = ("ink", "--", "o") if curve.baseline else next(looks)
        style: dict[str, Any] = {"color": light_color(color), "label": chart.english(curve.name), "linestyle": line}
        axes.plot(curve.x, curve.y, marker=marker if markers else "", markersize=4, linewidth=1.6, **style)
        if curve.low is not None and curve.high is not None:
            aside = (index - (len(curves) - 1) / 2) * gap  # beside each other, where all would be at the same x
            place = axes.transData + ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
            axes.vlines(curve.x, curve.low, curve.high, color=light_color(color), linewidth=1.2, transform=place)
            ends = [*zip(curve.x, curve.low, strict=True), *zip(curve.x, curve.high, strict=True)]
            axes.update_datalim([end for end in ends if all(map(math.isfinite, end))])
    axes.autoscale_view()
    if vertical is not None:
        label = chart.english(vertical[1])  # in the legend: beside the line it would be among the bars
        axes.axvline(vertical[0], color=light_color("soft"), linewidth=1, linestyle=":", label=label)
    if x_ticks is not None:
        axes.set_xticks([x for x, _ in x_ticks], [label for _, label in x_ticks])
        axes.minorticks_off()
    axes.grid(axis="y", color=light_color("line"))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:  # in the order of the curves' ends
        last = [curve.y[-1] if len(curve.y) and math.isfinite(curve.y[-1]) else -math.inf for curve in curves]
        order = [*sorted(range(len(curves)), key=lambda i: -last[i]), *range(len(curves), len(handles))]
        named = {"handles": [handles[i] for i in order], "labels": [labels[i] for i in order]}
        figure.legend(**named, fontsize=10, frameon=False, handlelength=3.2, loc="outside right upper")
    return chart


def draw_dots(
    dots: Sequence[Dot], *, x_label: Text | str, title: Text | str, legend: tuple[Text | str, Text | str]
) -> Chart:
    """A row per name, the lowest value on top: where it began, where it ended, and that value in digits.

    `legend` names the two. One that is far beyond the others is an arrow at the edge.
    """
    ordered = sorted(dots, key=lambda dot: (not math.isfinite(dot.end), dot.end), reverse=True)
    chart = Chart(11, 1.2 + 0.27 * len(ordered))
    axes = chart.axes(x_label, "", title)
    ends = [dot.end for dot in ordered if math.isfinite(dot.end)] or [0.0]
    first, third = np.percentile(ends, [25, 75])
    near = [dot for dot in ordered if not dot.end > third + FAR * (third - first)]
    found = [value for dot in near for value in (dot.start, dot.end, dot.low, dot.high) if value is not None]
    values = [value for value in found if math.isfinite(value)] or ends
    least, edge = min(values), max(values)
    margin = 0.04 * (edge - least) or 1.0
    axes.set_xlim(least - margin, edge + (1 if len(near) == len(ordered) else 2.5) * margin)
    for y, dot in enumerate(ordered):
        color = light_color("ink" if dot.baseline else "c1")
        shown = dot.end if dot in near else edge + 1.6 * margin
        if dot in near or dot.start <= edge:  # beyond the edge the arrow stands for both values
            axes.plot([dot.start, shown], [y, y], color=light_color("faint"), linewidth=1.2, zorder=1)
            axes.plot(dot.start, y, "o", markersize=5, color=color, markerfacecolor=light_color("paper"), zorder=2)
        axes.plot(shown, y, "o" if shown == dot.end else ">", markersize=6.5, color=color, zorder=3)
        if dot.low is not None and dot.high is not None and shown == dot.end:
            axes.plot([dot.low, dot.high], [y, y], color=color, linewidth=2.4, solid_capstyle="butt", zorder=2)
        written = f"{dot.end:.3f}" if math.isfinite(dot.end) else "–"
        axes.annotate(written, (1, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=10)  # fmt: skip
    axes.set_yticks(range(len(ordered)), [dot.name for dot in ordered])
    axes.set_ylim(-0.7, len(ordered) - 0.3)
    axes.grid(axis="y", color=light_color("line"))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for name, fill in zip(legend, ("paper", "c1"), strict=True):
        axes.plot([], [], "o", color=light_color("c1"), markerfacecolor=light_color(fill), label=chart.english(name))
    chart.figure.legend(fontsize=10, frameon=False, ncols=2, loc="outside upper right")
    return chart


def to_png(chart: Chart) -> bytes:
    """A chart as a PNG file, light and in English."""
    stream = io.BytesIO()
    chart.figure.savefig(stream, dpi=110, format="png", facecolor=light_color("paper"))
    return stream.getvalue()


def to_svg(chart: Chart) -> str:
    """A chart as SVG for a page, in its colors and letters and both of its languages.

    Its ids are a function of what is drawn: two charts on a page do not share any unless they are the same.
    """
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "phasor"}):
        chart.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue().decode("utf-8")
    for name in PAINTED:
        svg = svg.replace(light_color(name), f"var(--{name})")

    def translate(match: re.Match[str]) -> str:
        text = chart.texts.get(unescape(match[2]))
        return match[0] if text is None else f"{match[1]}{mark_up(text, 'tspan', escape)}</text>"

    return re.sub(r"(<text[^>]*>)([^<]*)</text>", translate, svg)
