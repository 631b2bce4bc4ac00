"""`phasor bench`: time workloads, or say which path every operation takes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasor.bench import DEFAULT_WORKLOADS, FAMILIES, STUDIES, WORKLOADS
from phasor.cli.options import add_weights, declare_options
from phasor.cli.output import console, new_table, print_json, show
from phasor.config.schema import json_value, unknown
from phasor.config.text_files import read_text

if TYPE_CHECKING:
    from phasor.bench.report import Entry, Report, WorkloadResult
    from phasor.inspect.backends import Backends

EXPLAINING = ("dtype", "weights", "precision", "length", "training")
MEASURING = ("workloads", "family", "set", "full", "compile", "plot", "read")

MEASURING_OPTIONS = {
    "--full": "published sizes, a model of 1.04 B; needs a large GPU",
    "--compile": "compiled variants too; slow to start",
    "--json FILE": "write JSON into a file, after every workload, or - to print it",
    "--read FILE": "time nothing; show or draw what --json wrote",
}
EXPLAINING_OPTIONS = {
    "--dtype NAME": "float32, bfloat16, ...; bfloat16 on a GPU, else float32",
    "--length N": "tokens; the model's max_length by default",
    "--training": "a training step instead of a forward pass and decoding",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Time workloads, compared with other installed libraries and with the machine's limit.\n"
        "Results are checked first, and a wrong one has no time."
    )
    width = max(map(len, WORKLOADS))
    lines = [f"  {name:{width}}  {line}" for name, line in WORKLOADS.items()]
    width = max(map(len, STUDIES))
    studies = [f"  {name:{width}}  {line}" for name, line in STUDIES.items()]
    parser.epilog = "\n".join(
        [
            "workloads:",
            *lines,
            f"Without any: {', '.join(DEFAULT_WORKLOADS)}; with --full: all but families.",
            "",
            "workloads that run alone, with their own settings (--set) and JSON:",
            *studies,
        ]
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="what to time, as listed below")
    parser.add_argument(
        "--family", nargs="+", metavar="NAME", default=[], help=f"of the workload families: {', '.join(FAMILIES)}"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; a GPU where there is one")
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="a setting of a workload that runs alone, such as lengths=4096,16384; an unknown one lists all",
    )
    declare_options(parser, MEASURING_OPTIONS)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw a bar chart into a file, such as bench.png")
    group = parser.add_argument_group("which path is taken")
    group.add_argument(
        "--explain",
        nargs="?",
        const="preset:llama-3.1",
        metavar="MODEL",
        help="time nothing; say which path every operation takes and why not a faster one. "
        "preset:NAME, a configuration file, or a model folder; Llama 3.1 if left out",
    )
    add_weights(group, "of a model whose large weights are in 8 or 4 bits")
    group.add_argument("--precision", choices=["float8"], help="of a model that trains with matmuls in this dtype")
    declare_options(group, EXPLAINING_OPTIONS)


def run(given: argparse.Namespace) -> int:
    for name in EXPLAINING if given.explain is None else MEASURING:
        if getattr(given, name):
            what = name if name == "workloads" else f"--{name}"
            raise ValueError(f"{what} {'needs' if given.explain is None else 'does not go with'} --explain")
    if given.json is not None and given.json != "-":
        check_place(Path(given.json))
    if given.explain is not None:
        return explain(given)
    studies = [name for name in given.workloads if name in STUDIES]
    return run_study(given, studies) if studies else measure(given)


def run_study(given: argparse.Namespace, studies: list[str]) -> int:
    """A workload that runs alone, with its own settings and JSON."""
    from phasor.bench.study import load_study, read_settings, run_study

    if len(given.workloads) > 1:
        raise ValueError(f"the workload {studies[0]} runs alone")
    for option in ("full", "compile", "family", "read"):
        if getattr(given, option):
            raise ValueError(f"--{option} does not go with the workload {studies[0]}, which has settings: --set")
    draw: Any = getattr(load_study(studies[0]), "draw", None)
    if given.plot is not None:
        from phasor.bench.chart import check_chart

        if draw is None:
            raise ValueError(f"the workload {studies[0]} draws nothing: leave --plot out")
        check_chart(given.plot)
    result = run_study(
        studies[0],
        read_settings(studies[0], given.set),
        device=given.device or "auto",
        say=(lambda line: None) if given.json == "-" else partial(print, flush=True),
        save=lambda result: write_json(result, given.json) if is_kept(given.json) else None,
    )
    if given.json is not None:
        write_json(result, given.json)
    if given.plot is not None:
        draw(result, given.plot)
    return 0


def check_place(file: Path) -> None:
    from phasor.bench.chart import check_folder

    check_folder(file)


def explain(given: argparse.Namespace) -> int:
    from phasor.inspect.backends import backends

    found = backends(
        given.explain,
        device=given.device,
        dtype=given.dtype,
        length=given.length,
        training=given.training,
        weights=given.weights,
        precision=given.precision,
    )
    if given.json is None:
        show_paths(found)
    else:
        write_json(found.to_dict(), given.json)
    return 0


def show_paths(found: Backends) -> None:
    table = new_table(found.title, ["where", "operation", "path", "why not a faster one"])
    for one in found.ops:
        table.add_row(one.where, one.op, one.path, one.reason or "it is the fastest")
    show(table)


def measure(given: argparse.Namespace) -> int:
    """The exit code is 1 where one of our own results was wrong or failed."""
    if given.set:
        raise ValueError(f"--set is for one of the workloads that run alone: {', '.join(STUDIES)}")
    if given.plot is not None:
        from phasor.bench.chart import check_chart

        check_chart(given.plot)
    without_tables = given.json is not None and (given.json == "-" or importlib.util.find_spec("rich") is None)
    shown_row: Callable[[WorkloadResult], None] = (lambda row: None) if without_tables else show_row
    if not without_tables:
        console()

    def on_row(report: Report) -> None:
        """Written after every row, so that an interrupted benchmark keeps its results."""
        shown_row(report.rows[-1])
        if is_kept(given.json):
            write_json(report.to_dict(), given.json)

    if given.read is None:
        from phasor.bench.runner import measure

        compiles = given.compile or given.full
        device = given.device or "auto"
        report = measure(
            given.workloads,
            device=device,
            full=given.full,
            compile=compiles,
            family=given.family,
            progress=progress,
            on_row=on_row,
        )
    else:
        report = read(given, shown_row)
    if not without_tables:
        show_families(report)
        show_machine(report)
    if given.json is not None:
        write_json(report.to_dict(), given.json)
    if given.plot is not None:
        from phasor.bench.chart import draw

        draw(report, given.plot)
    failed = [entry for row in report.rows for entry in row.entries if entry.ours and entry.value is None]
    return 1 if failed else 0


def read(given: argparse.Namespace, found: Callable[[WorkloadResult], None]) -> Report:
    """A report from a file."""
    from phasor.bench.report import Report

    if given.full or given.compile or given.device or given.family:
        raise ValueError("--read times nothing: it goes without --device, --family, --full and --compile")
    try:
        report = Report.from_dict(json.loads(read_text(given.read)))
    except ValueError as error:
        raise ValueError(f"{given.read}: {error}") from None
    for name in given.workloads:
        if name not in {row.workload for row in report.rows}:
            raise unknown(f"workload in {given.read}:", name, dict.fromkeys(row.workload for row in report.rows))
    report = replace(
        report, rows=tuple(row for row in report.rows if not given.workloads or row.workload in given.workloads)
    )
    for row in report.rows:
        found(row)
    return report


def progress(line: str, done: int, total: int) -> None:
    """Show what is being timed on standard error, where that is a terminal."""
    if sys.stderr.isatty():
        text = "" if done == total else f"{done + 1}/{total} {line}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show_row(row: WorkloadResult) -> None:
    progress("", 1, 1)
    further: dict[str, Callable[[Entry], str | None]] = {
        "GiB": lambda entry: None if entry.memory is None else f"{entry.memory:.1f}",
        "device ms": lambda entry: None if entry.device is None else number(entry.device),
        "idle": lambda entry: None if entry.idle is None else f"{100 * entry.idle:.0f} %",
        "compile s": lambda entry: None if entry.compile is None else f"{entry.compile:.1f}",
    }
    shown = [head for head, text in further.items() if any(text(entry) is not None for entry in row.entries)]
    table = new_table(row.title, ["implementation", row.unit, "of the limit", "phasor speedup", "error", *shown])
    for column in table.columns[1:]:
        column.justify = "right"
    for entry in row.entries:
        table.add_row(*cells(row, entry), *(further[head](entry) or "" for head in shown))
    table.add_section()
    table.add_row(f"limit: {row.limit_basis}", number(row.limit), "100 %")
    show(table)


def show_families(report: Report) -> None:
    """How many times as fast as transformers each family is, in one table."""
    rows = [row for row in report.rows if row.family]
    if not rows:
        return
    parts = list(dict.fromkeys(row.part for row in rows))
    found = {(row.family, row.part): speedup(row) for row in rows}
    names = max((row.entries for row in rows), key=len)
    shown = ", ".join(entry.name for entry in names)
    table = new_table(f"phasor speedup over transformers, and milliseconds: {shown}", ["family", *parts])
    for column in table.columns[1:]:
        column.justify = "right"
    for family in dict.fromkeys(row.family for row in rows):
        table.add_row(family, *(found.get((family, part), "") for part in parts))
    show(table)


def speedup(row: WorkloadResult) -> str:
    """How many times as fast as transformers the fastest of ours is, and the milliseconds of all."""
    ratio = row.speedup_over(row.entries[-1])
    times = ", ".join("failed" if entry.value is None else number(entry.value) for entry in row.entries)
    return "failed" if ratio is None else f"{ratio:.2f} x: {times}"


def cells(row: WorkloadResult, entry: Entry) -> list[str]:
    share, against = row.fraction_of_limit(entry), row.speedup_over(entry)
    error = "" if entry.error is None else f"{entry.error:.1e}"
    if entry.value is None or share is None:
        return [f"{entry.name}: {entry.note}", "-", "", "", error]
    return [
        entry.name,
        number(entry.value),
        f"{100 * share:.1f} %",
        "" if against is None else f"{against:.2f} x",
        error,
    ]


def number(value: float) -> str:
    """
    >>> number(0.16543), number(71834.2)
    ('0.165', '71,834')
    """
    from phasor.bench.chart import format_value

    return format_value(value)


def show_machine(report: Report) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print(
        f"{report.device}, {report.dtype}: copies {report.bandwidth / 1e9:,.1f} GB/s, multiplies "
        f"{report.arithmetic / 1e12:,.3g} TFLOP/s\n{versions}"
    )


def is_kept(where: str | None) -> bool:
    """Whether JSON goes into a file, which it can be written into again, and not onto a screen, a pipe or a device.

    >>> is_kept("bench.json"), is_kept("/dev/null"), is_kept("-"), is_kept(None)
    (True, False, False, False)
    """
    return where not in (None, "-") and (not Path(where).exists() or Path(where).is_file())


def write_json(value: Any, where: str) -> None:
    text = json.dumps(json_value(value), indent=1, ensure_ascii=False) + "\n"
    if where == "-":
        print_json(value)
    elif not is_kept(where):
        Path(where).write_text(text, encoding="utf-8")
    else:
        from phasor.files import atomic_write

        with atomic_write(Path(where).resolve(), unique=True) as file:
            file.write_text(text, encoding="utf-8")
