"""The report of a comparison: tables, charts, and one page that needs no other file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from phasor.data.tasks import TASKS
from phasor.evaluation.compare.schemes import ROTARY
from phasor.evaluation.lengths_report import (
    describe_factor,
    describe_orders,
    describe_protocol,
    draw_losses,
    factor_of,
    format_interval,
    length_name,
    order_lines,
    plural,
)
from phasor.evaluation.report import Curve, Page, draw_curves, to_png, to_svg

Result = dict[str, Any]
Sections = Callable[[Page], Page]  # adds sections to a page


def loss_rows(result: Result, column: str = "loss") -> list[list[str]]:
    """A row of cells per model: its name, then one cell per length."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["extension"], []).append(row)
    if column == "seeds":
        names = [*result["schemes"], result["baseline"]]
        return [[name, *(format_spread(row["seeds"]) for row in by_name[name])] for name in names]
    sign = "" if column == "loss" else "+"
    skipped = 1 if column == "change" else 0
    return [
        [f"{name}{factor_of(rows)}", *(format_interval(row[column], sign) for row in rows[skipped:])]
        for name, rows in by_name.items()
        if rows[0][column] is not None
    ]


def format_spread(values: list[float | None], digits: int = 4) -> str:
    """
    >>> format_spread([2.5, 2.25, 2.75]), format_spread([2.5, None])
    ('2.2500 to 2.7500', 'not finite')
    """
    if any(value is None for value in values):
        return "not finite"
    known = [value for value in values if value is not None]
    return f"{min(known):.{digits}f} to {max(known):.{digits}f}"


def exact_rows(result: Result) -> list[list[str]]:
    """A row of cells per scheme: its name, then the share of exact answers at each size."""
    rows = []
    for name in result["schemes"]:
        cells = []
        for row in (row for row in result["rows"] if row["scheme"] == name):
            exact = row["exact"]
            spread = f", seeds {format_spread([100 * s for s in row['seeds']], 0)}" if result["seeds"] > 1 else ""
            share, low, high = (100 * exact[end] for end in ("estimate", "low", "high"))
            cells.append(f"{share:.0f} % [{low:.0f}, {high:.0f}]{spread}")
        rows.append([name, *cells])
    return rows


def scheme_result(result: Result, names: list[str]) -> Result:
    """The same result with some of its models alone."""
    return result | {"names": {name: result["names"][name] for name in names}}


def text_charts(result: Result) -> dict[str, tuple[bytes, str]]:
    """The schemes beside a window of the trained length; and rotary with its extensions, where it was compared."""
    shown = {"compare": [*result["schemes"], result["baseline"]], "difference": result["schemes"]}
    variants = [name for name in result["names"] if name.partition(" (")[0] == ROTARY]
    if variants:
        shown["rotary"] = [name for name in variants if name != result["baseline"]]
    figures = {
        name: draw_losses(scheme_result(result, names), "loss" if name == "compare" else "difference")
        for name, names in shown.items()
    }
    return {name: (to_png(figure), to_svg(figure)) for name, figure in figures.items()}


def task_charts(result: Result) -> dict[str, tuple[bytes, str]]:
    """The share of exact answers by size."""
    curves = []
    for name in result["schemes"]:
        rows = [row for row in result["rows"] if row["scheme"] == name]
        share, low, high = ([100 * row["exact"][end] for row in rows] for end in ("estimate", "low", "high"))
        curves.append(Curve(name, [row["size"] for row in rows], share, low, high))
    figure = draw_curves(
        curves,
        x_label=f"size of problems ({result['item']}s)",
        y_label="exact answers (%)",
        x_ticks=[(size, str(size)) for size in result["lengths"]],
        vertical=(result["trained_size"], f"trained to {result['trained_size']}"),
        title=f"Task {result['task']}: exact answers by size, intervals of 95 %",
    )
    figure.axes[0].set_ylim(-3, 103)
    return {"compare": (to_png(figure), to_svg(figure))}


def text_page(result: Result, figures: dict[str, str], first: Sections) -> Page:
    """The page of a comparison on texts, but for how to get it again; `first` adds what stands before the figures."""
    heads = ["model", *map(length_name, result["lengths"])]
    count = plural(result["seeds"], "seed")
    made = Page(
        "Position schemes compared",
        f"{result['model']}, {result['steps']:,} steps at {result['trained_length']:,} tokens, {count}, on "
        f"{result['data']}",
    )
    first(made).paragraph(describe_protocol(result))
    made.figure(figures["compare"], "Loss by length; bars are intervals of the mean over documents or rows")
    made.heading("Loss, nats per token").table(heads, loss_rows(result))
    if result["seeds"] > 1:
        made.heading("Spread over seeds").table(heads, loss_rows(result, "seeds"), "The lowest and the highest mean")
    made.heading(f"Change since {result['trained_length']:,} tokens, paired")
    made.table([heads[0], *heads[2:]], loss_rows(result, "change"), "0 is a flat curve; above 0 the loss has grown")
    made.heading(f"Difference to {result['baseline']}, paired")
    made.figure(figures["difference"], "What schemes differ by from a window of the trained length, paired")
    made.table(heads, loss_rows(result, "difference"), "Below 0: better than the window")
    made.heading("Orders, lowest loss first").bullets(order_lines(result)).paragraph(describe_orders(result))
    if "rotary" in figures:
        made.heading("Rotary with every extension").figure(
            figures["rotary"],
            "Rotary as trained, with each extension untuned, and with sinks, beside a window",
        )
        made.bullets(order_lines(result | {"orders": result["rotary_orders"]}))
    made.heading("What was compared").table(["name", "what it is"], list(result["names"].items()))
    return made.bullets([*describe_factor(result), *result["notes"]])


def task_page(result: Result, figures: dict[str, str], first: Sections) -> Page:
    """The page of a comparison on a task, but for how to get it again; `first` adds what stands before the figures."""
    heads = ["scheme", *(f"{size} {result['item']}s" for size in result["lengths"])]
    count = plural(result["seeds"], "seed")
    made = Page(
        f"Position schemes compared: {result['task']}",
        f"{result['model']}, {result['steps']:,} steps on problems of up to {result['trained_size']} "
        f"{result['item']}s, {count}",
    )
    first(made).paragraph(
        f"An answer is right where greedy decoding writes exactly its tokens and ends there. {result['problems']:,} "
        f"problems of each size, the same for every scheme and seed; intervals are Wilson's, at 95 %, over the "
        f"problems of all seeds."
    )
    made.code("\n".join(example_lines(result)))
    made.figure(figures["compare"], "Exact answers by size")
    made.heading("Exact answers").table(heads, exact_rows(result))
    made.heading("Orders, fewest wrong answers first").bullets(order_lines(result)).paragraph(describe_orders(result))
    return made.bullets(result["notes"])


def example_lines(result: Result) -> list[str]:
    """A problem of the trained size and its answer.

    >>> example_lines({"task": "sort", "trained_size": 5})
    ['87425= -> 24578']
    """
    problem = TASKS[result["task"]].make(random.Random(0), result["trained_size"])
    return [f"{problem.prompt} -> {problem.answer}"]
