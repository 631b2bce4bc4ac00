"""A bar chart of a report: one panel per workload, phasor and the others beside each other, the limit as a line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from phasor.artifacts import refuse_artifact_file
from phasor.bench.report import Report, WorkloadResult
from phasor.distribution import missing_package

OURS, OTHERS, LIMIT = "#0072b2", "#b0b0b0", "#d55e00"
WIDEST = 4.0  # the axis ends at this many times the longest bar, even where the limit lies beyond


def check_chart(path: Path) -> None:
    """Raise ValueError where a chart cannot be drawn or written; called before anything is timed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_package("a chart needs the package matplotlib", "plot") from None
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"a chart is written as one of {', '.join(known)}, and {path} does not end in any of them")
    check_folder(path)


def check_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.absolute().parent} to write {path.name} to")
    refuse_artifact_file(path)


def draw(report: Report, path: Path) -> None:
    """Draw a report into a file."""
    from matplotlib.figure import Figure

    heights = [0.9 + 0.34 * len(row.entries) for row in report.rows]
    figure = Figure(figsize=(9, sum(heights) + 0.7), layout="constrained")
    figure.suptitle(f"{report.device}, torch {report.versions['torch']}", fontsize=11)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, row in zip(panels, report.rows, strict=True):
        draw_row(panel, row)
    figure.savefig(path, dpi=130)


def draw_row(panel: Any, row: WorkloadResult) -> None:
    names = [entry.name for entry in row.entries]
    values = [entry.value or 0.0 for entry in row.entries]
    places = range(len(names))
    panel.barh(places, values, color=[OURS if entry.ours else OTHERS for entry in row.entries], height=0.7)
    panel.set_yticks(places, names)
    panel.invert_yaxis()
    longest = max(values) or row.limit
    end = 1.18 * min(max(longest, row.limit), WIDEST * longest)
    panel.set_xlim(0, end)
    beyond = row.limit > end
    if not beyond:
        panel.axvline(row.limit, color=LIMIT, linestyle="--", linewidth=1.4)
    for place, entry in zip(places, row.entries, strict=True):
        label = format_value(entry.value) if entry.value is not None else entry.note.partition(":")[0]
        panel.text((entry.value or 0.0) + 0.008 * end, place, label, va="center", fontsize=9)
    better = "shorter is faster" if row.unit == "ms" else "longer is faster"
    limit = f"{'limit, beyond the axis:' if beyond else '- - limit'} {format_value(row.limit)} ({row.limit_basis})"
    panel.set_title(textwrap.fill(row.title, 110), loc="left", fontsize=10)
    panel.set_xlabel(f"{row.unit}, {better}", fontsize=9, loc="left")
    below = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    panel.annotate(limit, (1, 0), (0, -21), fontsize=9, color=LIMIT, **below)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)


def format_value(value: float) -> str:
    """
    >>> format_value(0.16543), format_value(71834.2)
    ('0.165', '71,834')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
