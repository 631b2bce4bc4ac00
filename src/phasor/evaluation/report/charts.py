"""Charts of reports, drawn by matplotlib: curves with intervals, as PNG and as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from phasor.config.distribution import missing_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito: told apart by color-blind readers too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
BASELINE = "#000000"
BAR_GAP, BAR_SPREAD = 2.5, 18  # points between the bars of two curves, and at most between all of them
STYLES = (("-", "o"), ("-.", "s"), (":", "^"))  # line and marker, one for each time that the colors are used up


@dataclass(frozen=True)
class Curve:
    """A named curve; `low` and `high` are the ends of its intervals. `baseline` draws it black and dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    baseline: bool = False


def check_charts() -> None:
    """Raise ValueError where charts cannot be drawn; called before the long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_package("a report needs the package matplotlib", "plot") from None


def draw_curves(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    x_ticks: Sequence[tuple[float, str]] | None = None,
    log_x: bool = False,
    markers: bool = True,
    vertical: tuple[float, str] | None = None,
) -> Figure:
    """Curves in one panel, with their intervals as bars; `vertical` is a labeled line, such as the trained length."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    if log_x:
        axes.set_xscale("log", base=2)
    looks = cycle((color, *style) for style in STYLES for color in COLORS)
    gap = min(BAR_GAP, BAR_SPREAD / max(1, len(curves) - 1))
    for index, curve in enumerate(curves):
        color, line, marker = (BASELINE, "--", "o") if curve.baseline else next(looks)
        style: dict[str, Any] = {"color": color, "label": curve.name, "linestyle": line}
        axes.plot(curve.x, curve.y, marker=marker if markers else "", markersize=4, linewidth=1.6, **style)
        if curve.low is not None and curve.high is not None:
            aside = (index - (len(curves) - 1) / 2) * gap  # beside each other, where all would be at the same x
            place = axes.transData + ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
            axes.vlines(curve.x, curve.low, curve.high, color=color, linewidth=1.2, alpha=0.7, transform=place)
            ends = [*zip(curve.x, curve.low, strict=True), *zip(curve.x, curve.high, strict=True)]
            axes.update_datalim([end for end in ends if all(map(math.isfinite, end))])
    axes.autoscale_view()
    if vertical is not None:
        axes.axvline(vertical[0], color="#999999", linewidth=1, linestyle=":")
        axes.annotate(
            vertical[1], (vertical[0], 0.5), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
            rotation=90, ha="right", va="center", fontsize=9, color="#666666",
        )  # fmt: skip
    if x_ticks is not None:
        axes.set_xticks([x for x, _ in x_ticks], [label for _, label in x_ticks])
        axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    if len(curves) > 1:  # in the order of the curves' ends
        last = [curve.y[-1] if len(curve.y) and math.isfinite(curve.y[-1]) else -math.inf for curve in curves]
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(curves)), key=lambda i: -last[i])
        named = {"handles": [handles[i] for i in order], "labels": [labels[i] for i in order]}
        figure.legend(**named, fontsize=9, frameon=False, handlelength=3.2, loc="outside right upper")
    return figure


def to_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=130, format="png")
    return stream.getvalue()


def to_svg(figure: Figure) -> str:
    """A figure as SVG for a page: letters as shapes, so that it looks the same everywhere.

    Its ids are a function of what is drawn: two charts on a page do not share any unless they are the same.
    """
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "phasor"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue().decode("utf-8")
