"""The report of an evaluation over lengths: its charts and its page."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from phasor.evaluation.protocols import PROTOCOLS
from phasor.evaluation.report import Curve, Page, draw_curves, to_png, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
LOSS = "loss (nats per token)"


def length_name(length: int) -> str:
    """
    >>> length_name(131072), length_name(6000)
    ('128k', '6,000')
    """
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def format_interval(interval: dict[str, Any], sign: str = "") -> str:
    """A mean with half the width of its interval, which is symmetric.

    >>> format_interval({"estimate": 2.5, "high": 2.75}), format_interval({"estimate": 2.5, "high": None}, "+")
    ('2.5000 ± 0.2500', '+2.5000')
    """
    if interval["estimate"] is None:
        return "not finite"
    width = "" if interval["high"] is None else f" ± {interval['high'] - interval['estimate']:.4f}"
    return f"{round(interval['estimate'], 4) + 0.0:{sign}.4f}{width}"


def table_rows(result: Result, column: str) -> list[list[str]]:
    """A row of cells per model: its name with the factor of its extension, then one cell per length."""
    sign = "+" if column == "difference" else ""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["extension"], []).append(row)
    return [
        [f"{name}{factor_of(rows)}", *(format_interval(row[column], sign) for row in rows)]
        for name, rows in by_name.items()
        if column != "difference" or name != result["baseline"]
    ]


def plural(count: int, what: str) -> str:
    """
    >>> plural(1, "row"), plural(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def factor_of(rows: list[dict[str, Any]]) -> str:
    """
    >>> factor_of([{"factor": 4.0}, {"factor": 4.0}]), factor_of([{"factor": 1.0}, {"factor": 2.0}])
    (' (factor 4)', ' (factors 1, 2)')
    """
    factors = list(dict.fromkeys(f"{row['factor']:g}" for row in rows if row["factor"] is not None))
    return f" (factor{'s' * (len(factors) > 1)} {', '.join(factors)})" if factors else ""


def order_lines(result: Result) -> list[str]:
    """One line per length: the groups of `order_groups`, and the orders that are shown within them.

    >>> pairs = [("a", "b", True), ("a", "c", True), ("b", "c", False)]
    >>> orders = [{"length": 8, "first": a, "second": b, "shown": shown} for a, b, shown in pairs]
    >>> order_lines({"lengths": [8], "orders": orders})
    ['8: a < {b, c}']
    """
    lines = []
    for length in result["lengths"]:
        groups, within = order_groups(result, length)
        text = " < ".join(names[0] if len(names) == 1 else f"{{{', '.join(names)}}}" for names in groups)
        also = f", and {', '.join(f'{a} < {b}' for a, b in within)}" if within else ""
        lines.append(f"{length_name(length)}: {text or 'one model, nothing to compare'}{also}")
    return lines


def order_groups(result: Result, length: int) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Names in the order of their losses at a length, in the smallest groups between which every order is shown.

    Behind them, the pairs within a group whose order is shown, but for those that follow from others.

    >>> pairs = [("a", "b", False), ("a", "c", True), ("b", "c", False)]
    >>> orders = [{"length": 8, "first": a, "second": b, "shown": shown} for a, b, shown in pairs]
    >>> order_groups({"orders": orders}, 8)
    ([['a', 'b', 'c']], [('a', 'c')])
    """
    pairs = [pair for pair in result["orders"] if pair["length"] == length]
    names = list(dict.fromkeys(pair["first"] for pair in pairs)) + [pair["second"] for pair in pairs[-1:]]
    shown = {(pair["first"], pair["second"]) for pair in pairs if pair["shown"]}
    groups: list[list[str]] = []
    for index, name in enumerate(names):
        if all((a, b) in shown for a in names[:index] for b in names[index:]):
            groups.append([])
        groups[-1].append(name)
    within = [
        (a, b)
        for group in groups
        for a, b in combinations(group, 2)
        if (a, b) in shown and not any({(a, c), (c, b)} <= shown for c in group)
    ]
    return groups, within


def order_chains(result: Result, length: int) -> list[tuple[list[str], bool]]:
    """Names in the order of their losses at a length, and whether that order is shown; none where there is one model.

    Neighbors are in one chain where their order is shown. Orders of others that are shown, and do not follow from such
    a chain, stand behind them.

    >>> pairs = [("a", "b", True), ("a", "c", True), ("b", "c", False)]
    >>> orders = [{"length": 8, "first": a, "second": b, "shown": shown} for a, b, shown in pairs]
    >>> order_chains({"orders": orders}, 8)
    [(['a', 'b'], True), (['b', 'c'], False), (['a', 'c'], True)]
    """
    pairs = [pair for pair in result["orders"] if pair["length"] == length]
    names = list(dict.fromkeys(pair["first"] for pair in pairs)) + [pair["second"] for pair in pairs[-1:]]
    shown = {(pair["first"], pair["second"]): pair["shown"] for pair in pairs}
    chains = [(names[:1], True)]
    for before, after in pairwise(names):
        if shown[before, after]:
            chains[-1][0].append(after)
        else:
            chains += [([before, after], False), ([after], True)]
    chains += [
        ([a, b], True)
        for (a, b), stated in shown.items()
        if stated
        and len(between := names[names.index(a) + 1 : names.index(b)]) > 0
        and not any(shown[a, c] and shown[c, b] for c in between)
    ]
    return [(chain, stated) for chain, stated in chains if len(chain) > 1]


def describe_protocol(result: Result) -> str:
    """The protocol in a sentence."""
    what = {
        "last": f"the last {result['targets_per_row']:,} tokens of each row of {result['lengths'][-1]:,}",
        "sliding": f"windows that move by {result['stride']} tokens, of which the new targets count",
        "truncated": "windows that do not overlap",
    }[result["protocol"]]
    return (
        f"Protocol {result['protocol']}: {PROTOCOLS[result['protocol']]} ({what}). {result['targets']:,} targets in "
        f"{plural(result['row_count'], 'row')} of {plural(result['documents']['used'], 'document')}, the same at every "
        f"length; intervals of 95 % over {plural(result['units'], result['unit'])}."
    )


def describe_orders(result: Result) -> str:
    """What has to be the case for an order to be stated."""
    seeds = result.get("seeds", 1)
    each = "the interval" if seeds == 1 else f"in each of the {seeds} seeds the interval"
    return (
        f"An order is stated where {each} of the paired difference excludes 0; within braces none is shown but those "
        "behind them. Each interval has the level by itself: of twenty pairs that do not differ, one is shown on "
        "average."
    )


def trained_mark(result: Result) -> tuple[int, str]:
    return result["trained_length"], f"trained at {length_name(result['trained_length'])}"


def draw_losses(result: Result, column: str = "loss") -> Figure:
    """The chart of the loss by length, or of its difference to the baseline, with the models in `names`."""
    curves = []
    for name in result["names"]:
        rows = [row for row in result["rows"] if row["extension"] == name and row[column] is not None]
        rows = [row for row in rows if row[column]["estimate"] is not None]
        low, high = ([row[column][end] for row in rows] for end in ("low", "high"))
        bounded = None not in low
        lengths, losses = [row["length"] for row in rows], [row[column]["estimate"] for row in rows]
        is_baseline = name == result["baseline"]
        curves.append(
            Curve(name, lengths, losses, low if bounded else None, high if bounded else None, baseline=is_baseline)
        )
    ticks = [(length, length_name(length)) for length in result["lengths"]]
    what, y_label = f"{column.capitalize()} by length", LOSS
    if column == "difference":
        what, y_label = f"Difference to {result['baseline']}, paired", "difference (nats per token)"
    return draw_curves(
        curves, x_label="length (tokens)", x_ticks=ticks, log_x=True, vertical=trained_mark(result), y_label=y_label,
        title=f"{what}, protocol {result['protocol']}, intervals of 95 %",
    )  # fmt: skip


def charts(result: Result) -> dict[str, tuple[bytes, str]]:
    """The charts by name, each as PNG and as SVG: loss by length, loss by position."""
    trained = trained_mark(result)
    by_length = draw_losses(result)
    positions = result["positions"]
    middles = [(a + b) / 2 for a, b in pairwise(positions["edges"])]
    lines = [
        Curve(name, middles, [float("nan") if y is None else y for y in loss], baseline=name == result["baseline"])
        for name, loss in positions["loss"].items()
    ]
    by_position = draw_curves(
        lines, x_label="position in the context", markers=False, vertical=trained, y_label=LOSS,
        title=f"Loss by position at {length_name(positions['length'])}",
    )  # fmt: skip
    figures = {"loss-by-length": by_length, "loss-by-position": by_position}
    return {name: (to_png(figure), to_svg(figure)) for name, figure in figures.items()}


def page(result: Result, figures: dict[str, str]) -> str:
    """The page, with charts as SVG."""
    heads = ["model", *map(length_name, result["lengths"])]
    summary = f"{result['model']}, trained at {result['trained_length']:,} tokens, on {result['data']}"
    made = Page("Loss by length", summary).paragraph(describe_protocol(result))
    made.figure(figures["loss-by-length"], "Loss by length; bars are intervals of the mean over documents or rows")
    made.heading("Loss, nats per token").table(heads, table_rows(result, "loss"))
    made.paragraph(
        "Intervals of the loss are wide because texts differ; what models differ by is in the next table, paired."
    )
    if len(result["names"]) > 1:
        made.heading(f"Difference to {result['baseline']}, paired")
        made.table(heads, table_rows(result, "difference"), "Below 0: better than the baseline")
        made.heading("Orders, lowest loss first").bullets(order_lines(result))
        made.paragraph(describe_orders(result))
    made.heading("Loss by position").figure(
        figures["loss-by-position"], f"Loss by position in a context of {result['positions']['length']:,} tokens"
    )
    made.heading("What was compared").table(["name", "what it is"], list(result["names"].items()))
    made.bullets([*describe_factor(result), *result["notes"]])
    return made.provenance(result["provenance"]).html()


def describe_factor(result: Result) -> list[str]:
    """How factors were chosen, in a sentence; none where no extension changes the positions by one."""
    if all(row["factor"] in (None, 1.0) for row in result["rows"]):
        return []
    kinds = {
        "largest": f"Every extension has one factor for all lengths, that of the largest, {result['lengths'][-1]:,} / "
        f"{result['original_length']:,}.",
        "per-length": "Every extension has a factor of its own at each length: another model at every point.",
    }
    return [kinds.get(str(result["factor"]), f"Every extension has the factor {result['factor']}.")]
