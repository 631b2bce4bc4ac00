"""The report of a comparison: tables, charts, and one page that needs no other file."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from phasor.config.schema import plural
from phasor.data.tasks import TASKS
from phasor.evaluation.lengths_report import (
    BARS,
    LOSS,
    NOT_FINITE,
    ORDERS,
    add_models,
    both_notes,
    describe_orders,
    describe_protocol,
    draw_losses,
    find_apart,
    join_names,
    length_name,
    loss_headline,
    order_lines,
    table_rows,
)
from phasor.evaluation.report import (
    Chart,
    Curve,
    Dot,
    Page,
    Text,
    chinese,
    draw_curves,
    draw_dots,
    to_png,
    to_svg,
)

Result = dict[str, Any]
Sections = Callable[[Page], Page]  # adds sections to a page


def spread_rows(result: Result) -> list[list[Text | str]]:
    """A row of cells per scheme: its name, then the lowest and the highest seed at each length."""
    found = {(row["extension"], row["length"]): row["seeds"] for row in result["rows"]}
    names = [*result["schemes"], result["baseline"]]
    return [[name, *(format_spread(found[name, length]) for length in result["lengths"])] for name in names]


def format_spread(values: list[float | None], digits: int = 4) -> Text:
    """
    >>> str(format_spread([2.5, 2.25, 2.75])), str(format_spread([2.5, None]))
    ('2.2500 to 2.7500', 'not finite')
    """
    if any(value is None for value in values):
        return NOT_FINITE
    known = [value for value in values if value is not None]
    low, high = (f"{end(known):.{digits}f}" for end in (min, max))
    return Text(f"{low} to {high}", f"{low} 至 {high}")


def exact_rows(result: Result) -> list[list[Text | str]]:
    """A row of cells per scheme: its name, then the share of exact answers at each size."""
    rows: list[list[Text | str]] = []
    for name in result["schemes"]:
        cells = []
        for row in (row for row in result["rows"] if row["scheme"] == name):
            exact = row["exact"]
            share, low, high = (100 * exact[end] for end in ("estimate", "low", "high"))
            cell = f"{share:.0f} % [{low:.0f}, {high:.0f}]"
            spread = format_spread([100 * s for s in row["seeds"]], 0)
            several = Text(f"{cell}, seeds {spread.en}", f"{cell}，随机种子 {spread.zh}")
            cells.append(several if result["seeds"] > 1 else Text(cell, cell))
        rows.append([name, *cells])
    return rows


def text_charts(result: Result) -> dict[str, tuple[bytes, str]]:
    """The schemes beside a window of the trained length; and that which has extensions with each of them."""
    shown = {"compare": [*result["schemes"], result["baseline"]], "difference": result["schemes"]}
    variants = [name for name in result["names"] if name.partition(" (")[0] == result["extended"]]
    if variants:
        shown["extensions"] = [name for name in variants if name != result["baseline"]]
    figures = {
        name: draw_losses(result | {"names": names}, "loss" if name == "compare" else "difference")
        for name, names in shown.items()
    }
    figures = {"ranking": draw_ranking(result), **figures}
    return {name: (to_png(figure), to_svg(figure)) for name, figure in figures.items()}


def draw_ranking(result: Result) -> Chart:
    """The schemes and the baseline by their loss at the largest length, with the loss at the trained length."""
    found = {(row["extension"], row["length"]): row for row in result["rows"]}
    first, last = result["lengths"][0], result["lengths"][-1]
    dots = []
    for name in [*result["schemes"], result["baseline"]]:
        start, end = (found[name, length]["loss"]["estimate"] for length in (first, last))
        seeds = [value for value in found[name, last]["seeds"] if value is not None]
        low, high = (min(seeds), max(seeds)) if len(seeds) == result["seeds"] > 1 else (None, None)
        start, end = (math.nan if value is None else value for value in (start, end))
        dots.append(Dot(name, start, end, low, high, baseline=name == result["baseline"]))
    spread = (
        Text("; bars: lowest and highest seed", "；横条：最低与最高的随机种子") if result["seeds"] > 1 else Text("", "")
    )
    return draw_dots(
        dots,
        x_label=LOSS,
        title=Text(f"Loss at {last:,} tokens{spread.en}", f"{last:,} 个词元处的损失{spread.zh}"),
        legend=(Text(f"{first:,} tokens", f"{first:,} 个词元"), Text(f"{last:,} tokens", f"{last:,} 个词元")),
    )


def task_charts(result: Result) -> dict[str, tuple[bytes, str]]:
    """The share of exact answers by size."""
    curves = []
    for name in result["schemes"]:
        rows = [row for row in result["rows"] if row["scheme"] == name]
        share, low, high = ([100 * row["exact"][end] for row in rows] for end in ("estimate", "low", "high"))
        curves.append(Curve(name, [row["size"] for row in rows], share, low, high))
    figure = draw_curves(
        curves,
        x_label=Text(f"size of problems ({result['item']}s)", "题目大小"),
        y_label=Text("exact answers (%)", "完全正确的答案（%）"),
        x_ticks=[(size, str(size)) for size in result["lengths"]],
        vertical=(
            result["trained_size"],
            Text(f"trained to {result['trained_size']}", f"训练到 {result['trained_size']}"),
        ),
        title=Text(
            f"Task {result['task']}: exact answers by size, intervals of 95 %",
            f"任务 {result['task']}：完全正确的答案随大小的变化，95 % 区间",
        ),
    )
    figure.figure.axes[0].set_ylim(-3, 103)
    return {"compare": (to_png(figure), to_svg(figure))}


def text_page(result: Result, figures: dict[str, str], first: Sections) -> Page:
    """The page of a comparison on texts, but for how to get it again; `first` adds what stands before the figures."""
    heads = ["model", *map(length_name, result["lengths"])]
    seeds, trained, last = result["seeds"], result["trained_length"], result["lengths"][-1]
    made = Page(
        loss_headline(result),
        Text(
            f"Position schemes compared: {result['model']}, {result['steps']:,} steps at {trained:,} tokens, "
            f"{plural(seeds, 'seed')}, on {result['data']}",
            f"位置方案的比较：{result['model_zh']}，在 {trained:,} 个词元上训练 {result['steps']:,} 步，"
            f"{seeds} 个随机种子，数据 {result['data']}",
        ),
    )
    first(made).paragraph(describe_protocol(result))
    made.figure(
        figures["ranking"],
        Text(
            f"Loss at {last:,} tokens, lowest first, and at the trained length (hollow); an arrow is beyond the edge",
            f"{last:,} 个词元处的损失，最低者在前；空心点为训练长度处；箭头表示超出边界",
        ),
    )
    made.figure(figures["compare"], BARS)
    made.heading(Text("Loss, nats per token", "损失，奈特每词元")).table(heads, table_rows(result, "loss"))
    if seeds > 1:
        made.heading(Text("Spread over seeds", "随机种子之间的差异"))
        made.table(heads, spread_rows(result), Text("The lowest and the highest mean", "最低与最高的均值"))
    made.heading(Text(f"Change since {trained:,} tokens, paired", f"自 {trained:,} 个词元起的变化，配对"))
    flat = Text("0 is a flat curve; above 0 the loss has grown", "0 表示曲线平坦；高于 0 表示损失增大")
    changes = [[name, *later] for name, _, *later in table_rows(result, "change")]
    made.table([heads[0], *heads[2:]], changes, flat)
    made.heading(Text(f"Difference to {result['baseline']}, paired", f"与 {result['baseline']} 之差，配对"))
    made.figure(
        figures["difference"],
        Text(
            "What schemes differ by from a window of the trained length, paired",
            "各方案与训练长度的窗口之差，配对",
        ),
    )
    made.table(heads, table_rows(result, "difference"), Text("Below 0: better than the window", "低于 0：优于窗口"))
    made.heading(ORDERS).bullets(order_lines(result)).paragraph(describe_orders(result))
    if "extensions" in figures:
        name = result["extended"]
        made.heading(Text(f"{name} with every extension", f"{name} 与各种扩展")).figure(
            figures["extensions"],
            Text(
                f"{name} as trained, with each extension untuned, and with sinks, beside a window",
                f"训练好的 {name}，未微调的各种扩展，以及 sinks，与窗口相比",
            ),
        )
        made.bullets(order_lines(result | {"orders": result["extension_orders"]}))
    return add_models(made, result)


def task_headline(result: Result) -> Text:
    """What the orders at the largest size show, in a sentence."""
    size, item = result["lengths"][-1], result["item"]
    at = Text(f"At {size} {item}s", f"在 {size} {chinese.ITEMS[item]}时")
    apart = find_apart(result, size)
    if apart is None:
        nothing = "no scheme is shown to be better or worse than all others"
        return Text(f"{at.en} {nothing}", f"{at.zh}，没有方案被证明优于或劣于其余所有方案")
    names = apart.names
    side = Text("more", "多") if apart.is_best else Text("fewer", "少")
    shares = {row["scheme"]: row["exact"]["estimate"] for row in result["rows"] if row["size"] == size}
    low, high = (f"{100 * end(shares[name] for name in names):.0f}" for end in (min, max))
    share = f"{low} %" if low == high else f"{low} to {high} %"
    return Text(
        f"{at.en} {join_names(names)} {'answers' if len(names) == 1 else 'answer'} {side.en} problems exactly than "
        f"all others: {share}",
        f"{at.zh}，{'、'.join(names)} 完全答对的题目{side.zh}于其余所有方案：{share.replace(' to ', ' 至 ')}",
    )


def task_page(result: Result, figures: dict[str, str], first: Sections) -> Page:
    """The page of a comparison on a task, but for how to get it again; `first` adds what stands before the figures."""
    item, size = result["item"], result["trained_size"]
    heads: list[Text | str] = ["scheme"]
    heads += [Text(f"{size} {item}s", f"{size} {chinese.ITEMS[item]}") for size in result["lengths"]]
    made = Page(
        task_headline(result),
        Text(
            f"Position schemes compared on the task {result['task']}: {result['model']}, {result['steps']:,} steps on "
            f"problems of up to {size} {item}s, {plural(result['seeds'], 'seed')}",
            f"位置方案在任务 {result['task']} 上的比较：{result['model_zh']}，"
            f"在不超过 {size} {chinese.ITEMS[item]}的题目上训练 {result['steps']:,} 步，{result['seeds']} 个随机种子",
        ),
    )
    first(made).paragraph(
        Text(
            f"An answer is right where greedy decoding writes exactly its tokens and ends there. "
            f"{result['problems']:,} problems of each size, the same for every scheme and seed; intervals are "
            "Wilson's, at 95 %, over the problems of all seeds.",
            f"贪心解码恰好写出答案的词元并在那里结束，才算正确。每种大小有 {result['problems']:,} 道题，"
            "各方案和随机种子都相同；区间是 Wilson 区间，95 %，取自所有随机种子的题目。",
        )
    )
    made.code("\n".join(example_lines(result)))
    made.figure(figures["compare"], Text("Exact answers by size", "完全正确的答案随大小的变化"))
    made.heading(Text("Exact answers", "完全正确的答案")).table(heads, exact_rows(result))
    made.heading(Text("Orders, fewest wrong answers first", "次序，错误答案最少者在前"))
    made.bullets(order_lines(result)).paragraph(describe_orders(result))
    return made.bullets(both_notes(result))


def example_lines(result: Result) -> list[str]:
    """A problem of the trained size and its answer.

    >>> example_lines({"task": "sort", "trained_size": 5})
    ['87425= -> 24578']
    """
    problem = TASKS[result["task"]].make(random.Random(0), result["trained_size"])
    return [f"{problem.prompt} -> {problem.answer}"]
