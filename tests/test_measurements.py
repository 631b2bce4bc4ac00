"""Figures that the pages take from benchmarks/results are those of the files: in tables, and in prose with a unit.

A part of a page, from a heading or a bold lead to the next, names the files that its figures come from.
"""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_pages import DOCS, FENCE, ROOT

from phasor.bench.sizes import FULL, GPU, LLAMA_8B
from phasor.bench.studies import lora
from phasor.config.parameters import parameters_of
from phasor.config.recipe import Recipe
from phasor.ops.quantized.nf4 import quantize_nf4
from phasor.recipes import find
from phasor.training.build import model_config

RESULTS = ROOT / "benchmarks" / "results"
UNITS = {  # by which a value of a file may have been multiplied, where it is shown with this unit
    "k": [1e-3],
    "M": [1e-6],
    "million": [1e-6],
    "TB/s": [1e-12],
    "us": [1, 1e3],
    "ms": [1, 1e3],
    "%": [1, 100],
    "s": [1],
    "GiB": [1],
    "MHz": [1],
    "tokens/s": [1],
    "TFLOP/s": [1],
}
UNIT = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
FIGURE = re.compile(rf"(?<![\w.^])(?<!\w-)(\d[\d,]*(?:\.\d+)?)(?:\*\*)?(?: ({UNIT})(?![\w/]))?(?![\w^]|\.\d)")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def values(record: object) -> Iterator[float]:
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield from values(value)
            if key == "share":  # of all pairs of queries and keys: the page shows by how much less that is
                yield 1 / value
    elif isinstance(record, int | float):
        yield float(record)


def parts(page: Path) -> dict[str, tuple[str, list[float]]]:
    """The parts of a page that name files of results, by their first words, each with the values of its files."""
    found = {}
    for part in re.split(r"^(?=\*\*|#{2,3} )", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        names = dict.fromkeys(re.findall(r"([\w-]+\.json)`", part))
        files = [RESULTS / name for name in names if (RESULTS / name).exists()]
        if files:
            measured = [value for file in files for value in values(json.loads(file.read_text(encoding="utf-8")))]
            found[f"{page.name}: {part.splitlines()[0][:40]}"] = part, measured
    return found


def sources(figure: str, unit: str, measured: list[float]) -> list[float]:
    """The values that the figure may stand for: those that round to it."""
    half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    number = float(figure.replace(",", ""))
    return [value for value in measured if any(abs(abs(value) * by - number) <= half for by in UNITS.get(unit, [1]))]


def is_ratio(figure: str, unit: str, row: list[float], table: list[float]) -> bool:
    """Whether a figure is the ratio of a value in its row to one in its table, or the other way round."""
    ratios = [ratio for a in row for b in table if a and b for ratio in (a / b, b / a)]
    return bool(sources(figure, unit, [100 * ratio for ratio in ratios] if unit == "%" else ratios))


def unknown_of_table(table: str, measured: list[float]) -> list[str]:
    """The figures of a table, but for its head and its first column, that are neither values nor ratios of them."""
    rows = [line.strip("|\n").split("|", 1) for line in table.splitlines()[2:]]
    shown = [[(f, unit, sources(f, unit, measured)) for f, unit in FIGURE.findall(" ".join(row))] for row in rows]
    everything = [value for row in shown for _, _, found in row for value in found]
    return [
        f"{figure} {unit}".strip()
        for (first, _), row in zip(rows, shown, strict=True)
        for figure, unit, found in row[len(FIGURE.findall(first)) :]
        if not found and not is_ratio(figure, unit, [value for _, _, near in row for value in near], everything)
    ]


PARTS = {name: part for page in DOCS for name, part in parts(page).items()}


@pytest.mark.parametrize("name", PARTS)
def test_figures_are_those_of_the_results(name):
    part, measured = PARTS[name]
    unknown = [figure for table in TABLE.findall(part) for figure in unknown_of_table(table, measured)]
    prose = FIGURE.findall(TABLE.sub("", part))
    absolute = [(figure, unit) for figure, unit in prose if unit not in ("", "k", "%")]
    unknown += [f"{figure} {unit}" for figure, unit in absolute if not sources(figure, unit, measured)]
    assert not unknown, f"{name}: not in the files that it names: {', '.join(unknown)}"


# Tables of figures that no file of results holds, by what their heads begin with, and what holds them instead.
ELSEWHERE = {
    "checkpoints.md: | family |": "tests/families/table.py writes it",
    "compare.md: | name | published": "benchmarks/published_results.py",
    "fine-tuning.md: | | bits per weight": "test_bits_of_quantized_bases",
    "parallel.md: | model | devices": "tests/parallel/test_guide.py",
    "parallel.md: | row | devices": "tests/parallel/test_guide.py",
    "parallel.md: | compared with": "tests/parallel/test_published_steps.py and test_plan_memory.py",
    "positions.md: | positions up to": "test_errors_by_position_are_those_of_the_example",
    "positions.md: | shifted by": "test_changes_of_logits_are_those_of_the_example",
    "positions.md: | mistake": "formulas",
    "speed.md: | workload | times": "test_sizes_of_the_workload_of_adapters",
    "training.md: | recipe": "test_sizes_of_recipes",
}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_tables_of_figures_are_in_files(page):
    """Every table with a unit, a decimal point or a negative power of ten is in a part that names its files."""
    checked = [table for part, _ in PARTS.values() for table in TABLE.findall(part)]
    for table in TABLE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        figures = FIGURE.findall("".join(table.splitlines(keepends=True)[2:]))
        small = re.search(r"\de-\d", table)
        if (small or any(unit or "." in figure for figure, unit in figures)) and table not in checked:
            assert f"{page.name}: {table}".startswith(tuple(ELSEWHERE)), table.splitlines()[0]


def test_errors_by_position_are_those_of_the_example(monkeypatch):
    """The worst errors of cosine and sine in docs/positions.md, as examples/precision.py measures them."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    precision = importlib.import_module("precision")
    errors = precision.worst_errors()
    text = (ROOT / "docs" / "positions.md").read_text(encoding="utf-8")
    table = next(table for table in TABLE.findall(text) if table.startswith("| positions up to |"))
    shown = re.findall(r"^\| 2\^(\d+) \|(.*)\|$", table, re.M)
    assert len(shown) == 10
    for power, cells in shown:
        measured = [errors[name][precision.POWERS.index(int(power))] for name in errors]
        assert [float(cell) for cell in cells.split("|")] == pytest.approx(measured, rel=0.05)  # of two digits


def test_changes_of_logits_are_those_of_the_example(monkeypatch):
    """The last bits of logits in float32, which differ between processors by less than a factor of 2."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    precision = importlib.import_module("precision")
    changes = precision.logit_changes(precision.small_llama())
    shown = re.findall(
        r"^\| 2\^(\d+) \| (\S+e-\d) \|$", (ROOT / "docs" / "positions.md").read_text(encoding="utf-8"), re.M
    )
    assert [int(power) for power, _ in shown] == list(changes)
    for power, change in shown:
        assert changes[int(power)] / 2 < float(change) < 2 * changes[int(power)]


@pytest.mark.parametrize(
    ("name", "millions"), [("translation", 9.4), ("translation-modern", 9.4), ("language-model", 14)]
)
def test_sizes_of_recipes(name, millions):
    """Parameters in millions, as docs/training.md says, with the largest vocabulary that the recipe allows."""
    recipe = Recipe.from_file(find(name))
    model = model_config(recipe, recipe.data.vocab_size)
    digits = len(f"{millions}".partition(".")[2])
    assert round(parameters_of(model).total / 1e6, digits) == millions


def test_bits_of_quantized_bases():
    """Of a matrix of 4,096 x 4,096 in NF4, as docs/fine-tuning.md says: of all that is stored."""
    stored = quantize_nf4(torch.empty(4096, 4096, device="meta"))
    bits = 8 * sum(tensor.nbytes for tensor in stored) / 4096**2
    assert f"| `nf4` | {bits:.2f} |" in (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")


def test_sizes_of_the_workload_of_adapters():
    """Parameters of the frozen bases, as docs/speed.md says."""
    models = GPU.model, FULL.model, LLAMA_8B
    bases = (lora.shape_config(sizes, 2048, tied=sizes is not LLAMA_8B) for sizes in models)
    small, full, large = (parameters_of(base).total / 1e9 for base in bases)
    said = f"on a frozen base of {small:.2f} B ({full:.2f} B with `--full`) and {large:.0f} B parameters"
    assert said in (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")


def test_changed_figures_are_recognized():
    part, measured = next(part for name, part in PARTS.items() if "**Decoding**" in name)
    (table,) = TABLE.findall(part)
    figures = [figure for figure, unit in FIGURE.findall(table) if unit]
    assert figures
    for figure in figures:
        assert unknown_of_table(table.replace(figure, f"7{figure}", 1), measured)
