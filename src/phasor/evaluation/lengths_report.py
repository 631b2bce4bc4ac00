"""The report of an evaluation over lengths: its charts and its page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from phasor.config.schema import plural
from phasor.evaluation.protocols import PROTOCOLS
from phasor.evaluation.report import Chart, Curve, Page, Text, chinese, draw_curves, to_png, to_svg

Result = dict[str, Any]
ORDERS = Text("Orders, lowest loss first", "次序，损失最低者在前")
BARS = Text(
    "Loss by length; bars are intervals of the mean over documents or rows",
    "损失随长度的变化；竖线是按文档或行取均值的区间",
)
LOSS = Text("loss (nats per token)", "损失（奈特每词元）")
NOT_FINITE = Text("not finite", "不是有限数")


def length_name(length: int) -> str:
    """
    >>> length_name(131072), length_name(6000)
    ('128k', '6,000')
    """
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def format_interval(interval: dict[str, Any], sign: str = "") -> Text | str:
    """A mean with half the width of its interval, which is symmetric.

    >>> format_interval({"estimate": 2.5, "high": 2.75}), format_interval({"estimate": 2.5, "high": None}, "+")
    ('2.5000 ± 0.2500', '+2.5000')
    """
    if interval["estimate"] is None:
        return NOT_FINITE
    width = "" if interval["high"] is None else f" ± {interval['high'] - interval['estimate']:.4f}"
    return f"{round(interval['estimate'], 4) + 0.0:{sign}.4f}{width}"


def table_rows(result: Result, column: str) -> list[list[Text | str]]:
    """A row of cells per model that has the column: its name with the factor of its extension, then one per length."""
    sign = "" if column == "loss" else "+"
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["extension"], []).append(row)
    return [
        [name_with_factor(name, (row["factor"] for row in rows)), *(format_interval(row[column], sign) for row in rows)]
        for name, rows in by_name.items()
        if rows[0][column] is not None
    ]


def name_with_factor(name: str, every: Iterable[float | None]) -> Text:
    """
    >>> name_with_factor("yarn", [4.0, 4.0])
    Text(en='yarn (factor 4)', zh='yarn（因子 4）')
    >>> str(name_with_factor("yarn", [1.0, 2.0])), str(name_with_factor("own", [None]))
    ('yarn (factors 1, 2)', 'own')
    """
    factors = list(dict.fromkeys(f"{factor:g}" for factor in every if factor is not None))
    if not factors:
        return Text(name, name)
    return Text(
        f"{name} (factor{'s' * (len(factors) > 1)} {', '.join(factors)})", f"{name}（因子 {'、'.join(factors)}）"
    )


def order_lines(result: Result) -> list[Text]:
    """One line per length: the groups of `order_groups`, and the orders that are shown within them.

    >>> pairs = [("a", "b", True), ("a", "c", True), ("b", "c", False)]
    >>> orders = [{"length": 8, "first": a, "second": b, "shown": shown} for a, b, shown in pairs]
    >>> order_lines({"lengths": [8], "orders": orders})[0].en
    '8: a < {b, c}'
    """
    lines = []
    for length in result["lengths"]:
        groups, within = order_groups(result, length)
        text = " < ".join(names[0] if len(names) == 1 else f"{{{', '.join(names)}}}" for names in groups)
        pairs = [f"{a} < {b}" for a, b in within]
        name = length_name(length)
        lines.append(
            Text(
                f"{name}: {text or 'one model, nothing to compare'}{', and ' * bool(pairs)}{', '.join(pairs)}",
                f"{name}：{text or '只有一个模型，无从比较'}{'，以及 ' * bool(pairs)}{'、'.join(pairs)}",
            )
        )
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


class Apart(NamedTuple):
    """Names that are better than all others, or worse, every order being shown, and by how much at least."""

    names: list[str]
    is_best: bool
    difference: float


def find_apart(result: Result, length: int) -> Apart | None:
    """The best or the worst at a length, whichever are fewer; None where neither are apart from all others.

    The difference is the smallest of the paired ones between them and the others.

    >>> pairs = [("a", "b", True, -2.0), ("a", "c", True, -2.5), ("b", "c", False, -0.5)]
    >>> names = ("first", "second", "shown", "difference")
    >>> orders = [dict(zip(names, (*pair[:3], {"estimate": pair[3]}))) | {"length": 8} for pair in pairs]
    >>> find_apart({"orders": orders}, 8)
    Apart(names=['a'], is_best=True, difference=2.0)
    """
    groups, _ = order_groups(result, length)
    if len(groups) < 2:
        return None
    is_best = len(groups[0]) <= len(groups[-1])
    names = groups[0 if is_best else -1]
    pairs = [pair for pair in result["orders"] if pair["length"] == length]
    across = [pair for pair in pairs if (pair["first"] in names) != (pair["second"] in names)]
    return Apart(names, is_best, min(-pair["difference"]["estimate"] for pair in across))


def loss_headline(result: Result) -> Text:
    """What the orders at the largest length show, in a sentence."""
    length, trained = result["lengths"][-1], result["trained_length"]
    times = f"{length / trained:g}"
    at = Text(f"At {length:,} tokens", f"在 {length:,} 个词元处")
    if length > trained:
        at = Text(f"{at.en}, {times} times the trained length,", f"{at.zh}（训练长度的 {times} 倍）")
    apart = find_apart(result, length)
    if apart is None:
        nothing = "no model is shown to be better or worse than all others"
        return Text(f"{at.en} {nothing}", f"{at.zh}，没有模型被证明优于或劣于其余所有模型")
    names, is_best, gap = apart
    every = result.get("seeds", 1)
    several = every > 1
    seeds = Text(f" in each of {every} seeds" * several, f"在 {every} 个随机种子中都" * several)
    mean = Text(" on average" * several, "平均" * several)
    side = Text("lower", "低") if is_best else Text("higher", "高")
    have = f"has a {side.en} loss" if len(names) == 1 else f"have {side.en} losses"
    return Text(
        f"{at.en} {join_names(names)} {have} than all others{seeds.en}, by {gap:.3f} nats per token or more{mean.en}",
        f"{at.zh}，{'、'.join(names)} 的损失{seeds.zh}{side.zh}于其余所有模型，"
        f"每词元{mean.zh}至少{side.zh} {gap:.3f} 奈特",
    )


def join_names(names: Sequence[str]) -> str:
    """
    >>> join_names(["a"]), join_names(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def describe_protocol(result: Result) -> Text:
    """The protocol in a sentence."""
    protocol, per_row = result["protocol"], result["targets_per_row"]
    what = {
        "last": Text(
            f"the last {per_row:,} tokens of each row of {result['lengths'][-1]:,}",
            f"每行 {result['lengths'][-1]:,} 个词元中的最后 {per_row:,} 个",
        ),
        "sliding": Text(
            f"windows that move by {result['stride']} tokens, of which the new targets count",
            f"窗口每次移动 {result['stride']} 个词元，只计新的目标",
        ),
        "truncated": Text("windows that do not overlap", "窗口互不重叠"),
    }[protocol]
    rows, used = result["row_count"], result["documents"]["used"]
    return Text(
        f"Protocol {protocol}: {PROTOCOLS[protocol]} ({what.en}). {result['targets']:,} targets in "
        f"{plural(rows, 'row')} of {plural(used, 'document')}, the same at every "
        f"length; intervals of 95 % over {plural(result['units'], result['unit'])}.",
        f"协议 {protocol}：{chinese.PROTOCOLS[protocol]}（{what.zh}）。{used:,} 篇文档的 {rows:,} 行中有 "
        f"{result['targets']:,} 个目标，在每个长度上都相同；"
        f"95 % 区间取自 {result['units']:,} {chinese.UNITS[result['unit']]}。",
    )


def describe_orders(result: Result) -> Text:
    """What has to be the case for an order to be stated."""
    seeds = result.get("seeds", 1)
    each = "the interval" if seeds == 1 else f"in each of the {seeds} seeds the interval"
    every = "" if seeds == 1 else f"在 {seeds} 个随机种子的每一个中，"
    one = (
        Text("one is shown", "平均会有一对")
        if seeds == 1
        else Text("one seed alone shows one", "单个随机种子平均会有一对")
    )
    return Text(
        f"An order is stated where {each} of the paired difference excludes 0; within braces none is shown but those "
        f"behind them. Each interval has the level by itself: of twenty pairs that do not differ, {one.en} on average.",
        f"{every}配对差的区间不含 0 时才写出次序；花括号之内，除其后写出的以外，没有次序被证明。"
        f"每个区间各自具有该置信水平：二十对并无差别的模型中，{one.zh}被写出次序。",
    )


def trained_mark(result: Result) -> tuple[int, Text]:
    name = length_name(result["trained_length"])
    return result["trained_length"], Text(f"trained at {name}", f"训练长度 {name}")


def draw_losses(result: Result, column: str = "loss") -> Chart:
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
    baseline, protocol = result["baseline"], result["protocol"]
    what, y_label = Text("Loss by length", "损失随长度的变化"), LOSS
    if column == "difference":
        what = Text(f"Difference to {baseline}, paired", f"与 {baseline} 之差，配对")
        y_label = Text("difference (nats per token)", "差（奈特每词元）")
    return draw_curves(
        curves, x_label=Text("length (tokens)", "长度（词元）"), x_ticks=ticks, log_x=True,
        vertical=trained_mark(result), y_label=y_label,
        title=Text(f"{what.en}, protocol {protocol}, intervals of 95 %", f"{what.zh}，协议 {protocol}，95 % 区间"),
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
        lines, x_label=Text("position in the context", "上下文中的位置"), markers=False, vertical=trained, y_label=LOSS,
        title=Text(
            f"Loss by position at {length_name(positions['length'])}",
            f"长度 {length_name(positions['length'])} 时损失随位置的变化",
        ),
    )  # fmt: skip
    figures = {"loss-by-length": by_length, "loss-by-position": by_position}
    return {name: (to_png(figure), to_svg(figure)) for name, figure in figures.items()}


def page(result: Result, figures: dict[str, str]) -> str:
    """The page, with charts as SVG."""
    heads = ["model", *map(length_name, result["lengths"])]
    trained, length = result["trained_length"], result["positions"]["length"]
    made = Page(
        loss_headline(result),
        Text(
            f"{result['model']}, trained at {trained:,} tokens, on {result['data']}",
            f"{chinese.NAMES.get(result['model'], result['model'])}，训练长度 {trained:,} 个词元，"
            f"数据 {result['data']}",
        ),
    ).paragraph(describe_protocol(result))
    made.figure(figures["loss-by-length"], BARS)
    made.heading(Text("Loss, nats per token", "损失，奈特每词元")).table(heads, table_rows(result, "loss"))
    made.paragraph(
        Text(
            "Intervals of the loss are wide because texts differ; what models differ by is in the next table, paired.",
            "文本之间差异大，所以损失的区间宽；模型之间的差异见下一张配对的表。",
        )
    )
    if len(result["names"]) > 1:
        made.heading(Text(f"Difference to {result['baseline']}, paired", f"与 {result['baseline']} 之差，配对"))
        caption = Text("Below 0: better than the baseline", "低于 0：优于基线")
        made.table(heads, table_rows(result, "difference"), caption)
        made.heading(ORDERS).bullets(order_lines(result)).paragraph(describe_orders(result))
    made.heading(Text("Loss by position", "损失随位置的变化")).figure(
        figures["loss-by-position"],
        Text(f"Loss by position in a context of {length:,} tokens", f"{length:,} 个词元的上下文中，损失随位置的变化"),
    )
    return add_models(made, result).provenance(result["provenance"]).html()


def add_models(made: Page, result: Result) -> Page:
    """What was compared, how factors were chosen, and notes."""
    rows = [(name, Text(what, result["names_zh"][name])) for name, what in result["names"].items()]
    made.heading(Text("What was compared", "比较了什么")).table(["name", "what it is"], rows)
    return made.bullets([*describe_factor(result), *both_notes(result)])


def both_notes(result: Result) -> list[Text]:
    """The notes of a result in both languages."""
    return [Text(*pair) for pair in zip(result["notes"], result["notes_zh"], strict=True)]


def describe_factor(result: Result) -> list[Text]:
    """How factors were chosen, in a sentence; none where no extension changes the positions by one."""
    if all(row["factor"] in (None, 1.0) for row in result["rows"]):
        return []
    largest, original = result["lengths"][-1], result["original_length"]
    kinds = {
        "largest": Text(
            f"Every extension has one factor for all lengths, that of the largest, {largest:,} / {original:,}.",
            f"每种扩展在所有长度上用同一个因子，即最大长度的因子 {largest:,} / {original:,}。",
        ),
        "per-length": Text(
            "Every extension has another factor at each length: another model at every point.",
            "每种扩展在每个长度上有各自的因子：每个点都是另一个模型。",
        ),
    }
    given = Text(f"Every extension has the factor {result['factor']}.", f"每种扩展的因子都是 {result['factor']}。")
    return [kinds.get(str(result["factor"]), given)]
