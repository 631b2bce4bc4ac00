"""The report of retrieval: a heat map of depth and length for each task and extension, tables, and a page."""

from __future__ import annotations

from typing import Any

from phasor.evaluation.lengths_report import both_notes, length_name, name_with_factor
from phasor.evaluation.report import Chart, Page, Text, chinese, light_color, to_png, to_svg

Result = dict[str, Any]
COLORS = "cividis"  # reads the same in gray and for color-blind readers
DARK = 0.6  # a share from which on cells are so light that their text is dark
WIDTH, HEIGHT = 0.55, 0.36  # inches of a cell
LETTER = 0.09  # inches of a letter of a title
COLUMNS = 3


def percent(interval: dict[str, Any]) -> str:
    """A share with the ends of its interval, in percent.

    >>> percent({"estimate": 0.9, "low": 0.61, "high": 0.98})
    '90 % [61, 98]'
    """
    return f"{100 * interval['estimate']:.0f} % [{100 * interval['low']:.0f}, {100 * interval['high']:.0f}]"


def depth_rows(result: Result, task: str, extension: str) -> list[list[str]]:
    """The map of a task and an extension as rows of cells: the depth, then how many were right at each length."""
    cells = {(c["depth"], c["length"]): c for c in result["cells"] if (c["task"], c["extension"]) == (task, extension)}
    return [
        [f"{100 * depth:.0f} %", *(share(cells[depth, length]) for length in result["lengths"])]
        for depth in result["depths"]
    ]


def share(cell: dict[str, Any]) -> str:
    """
    >>> share({"correct": 9, "trials": 10, "log_probability": -0.314})
    '90 % (-0.31)'
    """
    return f"{100 * cell['correct'] / cell['trials']:.0f} % ({cell['log_probability']:.2f})"


def length_rows(result: Result, task: str) -> list[list[Text | str]]:
    """A row per extension of a task: its name, then the share over all depths with its interval, at each length."""
    found = {(c["extension"], c["length"]): c for c in result["all_depths"] if c["task"] == task}
    return [
        [model_name(result, name), *(percent(found[name, length]["exact_match"]) for length in result["lengths"])]
        for name in result["extensions"]
    ]


def model_name(result: Result, extension: str) -> Text:
    return name_with_factor(extension, [result["factors"][extension]])


def describe_map(result: Result) -> Text:
    """How the numbers were made, in a few sentences."""
    texts = "a filler that is repeated" if result["haystack"] is None else result["haystack"]
    chosen = "反复的填充文本" if result["haystack"] is None else result["haystack"]
    return Text(
        f"Prompt and answer together have exactly the tokens of the length. The depth is where the needle is: 0 % is "
        f"the beginning of the haystack, 100 % right before the question. The haystack is {texts}. Of each cell there "
        f"are {result['trials']:,} prompts, the same for every model. An answer is right where greedy decoding writes "
        f"exactly its tokens. Intervals are Wilson's, at 95 %.",
        f"提示与答案合起来恰好有该长度的词元数。深度是目标所在的位置：0 % 是干草堆的开头，100 % 紧挨在问题之前。"
        f"干草堆是{chosen}。每个格子有 {result['trials']:,} 个提示，对每个模型都相同。"
        f"贪心解码恰好写出答案的词元才算正确。区间是 Wilson 区间，95 %。",
    )


def headline(result: Result) -> Text:
    """The share of exact answers of every model at the largest length, over all tasks and depths, the most first."""
    length = result["lengths"][-1]
    right: dict[str, list[int]] = {}
    for cell in result["all_depths"]:
        if cell["length"] == length:
            counts = right.setdefault(cell["extension"], [0, 0])
            counts[0], counts[1] = counts[0] + cell["correct"], counts[1] + cell["trials"]
    shares = sorted(((100 * found / trials, name) for name, (found, trials) in right.items()), reverse=True)
    listed = [f"{name} {share:.0f} %" for share, name in shares]
    return Text(
        f"Exact answers at {length:,} tokens: {', '.join(listed)}",
        f"{length:,} 个词元处完全正确的答案：{'，'.join(listed)}",
    )


def chart(result: Result) -> tuple[bytes, str]:
    """The maps as PNG and as SVG: one per task and extension, those of a task in rows of three at most."""
    tasks, names = list(result["tasks"]), list(result["extensions"])
    lengths, depths = result["lengths"], result["depths"]
    columns = min(COLUMNS, len(names))
    lines = [(task, names[start : start + columns]) for task in tasks for start in range(0, len(names), columns)]
    letters = max(map(len, [*tasks, *(model_name(result, name).en for name in names)]))
    width = max(WIDTH * len(lengths), LETTER * letters)  # of a panel, so that titles do not run into each other
    size = columns * (width + 0.4) + 1.6, len(lines) * (HEIGHT * len(depths) + 0.9) + 0.4
    drawn = Chart(max(4.5, size[0]), max(2.4, size[1]))
    figure, ink = drawn.figure, light_color("ink")
    panels = figure.subplots(len(lines), columns, squeeze=False)
    shares = {(c["task"], c["extension"], c["length"], c["depth"]): c["correct"] / c["trials"] for c in result["cells"]}
    for row, (task, inner) in enumerate(lines):
        for axes, name in zip(panels[row], [*inner, *[None] * (columns - len(inner))], strict=True):
            axes.set_frame_on(False)
            axes.set_xticks([x + 0.5 for x in range(len(lengths))], [length_name(length) for length in lengths])
            axes.set_yticks([y + 0.5 for y in range(len(depths))], [f"{100 * depth:.0f} %" for depth in depths])
            axes.tick_params(length=0, labelleft=axes is panels[row][0], labelcolor=ink)
            if name is None:
                axes.set_axis_off()
                continue
            values = [[shares[task, name, length, depth] for length in lengths] for depth in depths]
            image = axes.pcolormesh(values, cmap=COLORS, vmin=0, vmax=1, edgecolors=light_color("paper"), linewidth=1)
            axes.set_ylim(len(depths), 0)
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    color = "#111111" if value >= DARK else "#ffffff"
                    axes.text(x + 0.5, y + 0.5, f"{100 * value:.0f}", ha="center", va="center", color=color, fontsize=9)
            axes.set_title(f"{task}\n{drawn.english(model_name(result, name))}", loc="left", fontsize=10)
    figure.supxlabel(drawn.english(Text("length, tokens", "长度，词元")), fontsize=10)
    figure.supylabel(drawn.english(Text("depth of the needle", "目标的深度")), fontsize=10)
    named = drawn.english(Text("exact match", "完全匹配"))
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02, ticks=[0, 0.5, 1], label=named)
    bar.ax.set_yticklabels(["0 %", "50 %", "100 %"])
    return to_png(drawn), to_svg(drawn)


def page(result: Result, svg: str) -> str:
    """The report as one HTML page."""
    trained = result["trained_length"]
    sheet = Page(
        headline(result),
        Text(
            f"Retrieval by length and depth: {result['model']}, trained at {trained:,} tokens",
            f"按长度和深度检索：{chinese.NAMES.get(result['model'], result['model'])}，训练长度 {trained:,} 个词元",
        ),
    )
    sheet.paragraph(describe_map(result))
    sheet.figure(svg, Text("Exact match in percent, by length and depth", "完全匹配的百分比，按长度和深度"))
    heads = ["model", *map(length_name, result["lengths"])]
    for task, summary in result["tasks"].items():
        english = f"{summary[0].upper()}{summary[1:]}."
        sheet.heading(task).paragraph(Text(english, f"{chinese.RETRIEVAL_TASKS.get(task, english)}。"))
        caption = Text("Exact match over all depths, with its 95 % interval", "所有深度上的完全匹配，附 95 % 区间")
        sheet.table(heads, length_rows(result, task), caption)
        for name in result["extensions"]:
            model = model_name(result, name)
            sheet.table(
                ["depth", *heads[1:]],
                depth_rows(result, task, name),
                Text(
                    f"{model}: exact match, and the mean log-probability of the answer in nats",
                    f"{model.zh}：完全匹配，以及答案的平均对数概率（奈特）",
                ),
            )
    if result["notes"]:
        sheet.heading(Text("Notes", "说明")).bullets(both_notes(result))
    models = [
        Text(f"{name}: {what}", f"{name}：{chinese.MODELS.get(name, what)}")
        for name, what in result["extensions"].items()
    ]
    sheet.heading(Text("Models", "模型")).bullets(models)
    return sheet.provenance(result["provenance"]).html()
