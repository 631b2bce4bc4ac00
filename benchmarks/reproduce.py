"""A published result beside ours, and for every order that it claims whether it was seen here.

    python benchmarks/reproduce.py yarn|alibi|nope|streaming --out FOLDER [options of phasor compare]

Compares what a paper compared, as `phasor compare` does, and writes its report with the published figures in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from published_results import PUBLISHED, Claim, Published

from phasor.cli.compare import add_options, given_settings, print_result
from phasor.cli.output import Bar, print_json, show_table, show_text
from phasor.cli.progress import progress_display
from phasor.config.schema import unknown
from phasor.evaluation.compare.comparison import (
    PAGE,
    TASK_FILE,
    Evaluating,
    StoppedError,
    describe_provenance,
    ignore,
    open_comparison,
    run_comparison,
    write_comparison,
)
from phasor.evaluation.compare.report import exact_rows
from phasor.evaluation.compare.settings import check_compare_settings
from phasor.evaluation.intervals import compare_lengths
from phasor.evaluation.lengths_report import describe_orders
from phasor.evaluation.report import Page, check_out, write_report
from phasor.training.progress import TrainingProgress

SEEN, OPPOSITE, NOT_SHOWN = "seen here", "the opposite was seen here", "not shown here"


def reproduce(
    name: str,
    out: str | Path,
    *,
    command: str | None = None,
    progress: TrainingProgress | None = None,
    evaluating: Evaluating | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare what a published result compared, and say of every order it claims whether it was seen here.

    `name` is "yarn", "alibi", "nope" or "streaming"; the options are those of `compare`, but for the schemes and tasks.
    """
    if name not in PUBLISHED:
        raise unknown("published result", name, PUBLISHED)
    published = PUBLISHED[name]
    for option in ("schemes", "question", "task", *(("tokenizer", "data", "valid") if published.tasks else ())):
        if options.get(option) is not None:
            raise ValueError(f"{name} says what is compared: leave --{option} out")
    progress, bar = progress or TrainingProgress(), evaluating or (lambda what: ignore)
    if published.tasks:
        result = reproduce_tasks(published, out, options, progress, bar, command)
    else:
        settings = dataclasses.replace(check_compare_settings(**options), schemes=published.schemes)
        with open_comparison(out, settings) as folder:
            result = run_comparison(settings, folder, progress, bar)
            result["provenance"] = describe_provenance(settings, result, command)
            pairs = text_pairs(result)
            result |= describe_publication(published, text_table(published, result), check_claims(published, pairs))
            write_comparison(folder.path, result, lambda page: add_publication(page, result))
    return result


def reproduce_tasks(
    published: Published,
    out: str | Path,
    options: Mapping[str, Any],
    progress: TrainingProgress,
    bar: Evaluating,
    command: str | None,
) -> dict[str, Any]:
    """Several tasks, each a comparison in its own folder, and the orders over all of their problems."""
    check_out(out, (TASK_FILE, PAGE))
    place = Path(out)
    write_report(place, {})  # marks the folder, before the comparisons in it
    results: dict[str, dict[str, Any]] = {}
    wrong: dict[tuple[str, int], list[Any]] = {}
    for task in published.tasks:
        settings = dataclasses.replace(check_compare_settings(**options, task=task), schemes=published.schemes)
        with open_comparison(place / task, settings) as folder:
            result = run_comparison(settings, folder, progress, bar)
            result["provenance"] = describe_provenance(settings, result, command)
            write_comparison(folder.path, result)
            results[task] = result
            for scheme in result["schemes"]:
                measured = [folder.read_measurement(scheme, seed) or {} for seed in range(settings.seeds)]
                for times in published.times:
                    exact = np.array([each["exact"][str(times * settings.length)] for each in measured])
                    wrong.setdefault((scheme, times), []).append(1.0 - exact)
    joined = {key: np.concatenate(each, axis=1) for key, each in wrong.items() if len(each) == len(results)}
    table = [
        [label, *(f"{100 * (1 - float(joined[scheme, times].mean())):.0f} %" for times in published.times)]
        for label, scheme in published.labels.items()
        if (scheme, published.times[0]) in joined
    ]
    found = compare_lengths(joined, list(published.labels.values()), published.times)
    pairs = [pair | {"times": pair["length"]} for pair in found]
    last = results[published.tasks[-1]]
    whole = {"tasks": results, "seeds": last["seeds"], "provenance": last["provenance"]}
    whole |= describe_publication(published, table, check_claims(published, pairs))
    page = Page("A published result beside ours", published.source)
    add_publication(page, whole)
    for task, result in results.items():
        heads = ["scheme", *(f"{size} {result['item']}s" for size in result["lengths"])]
        page.heading(f"Exact answers: {task}").table(heads, exact_rows(result)).bullets(result["notes"])
    html = page.provenance(whole["provenance"]).html()
    write_report(place, {TASK_FILE: json.dumps(whole, indent=2), PAGE: html})
    return whole


def text_pairs(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs of ours, each with the multiple of the trained length it is at."""
    name = result["extended"]
    own = [pair | {end: f"{name} ({pair[end]})" for end in ("first", "second")} for pair in result["extension_orders"]]
    pairs = [*result["orders"], *own]
    return [pair | {"times": pair["length"] // result["trained_length"]} for pair in pairs]


def text_table(published: Published, result: dict[str, Any]) -> list[list[str]]:
    """Our perplexities, a row per published name."""
    found = {(row["extension"], row["length"]): row["perplexity"] for row in result["rows"]}
    length = result["trained_length"]
    return [
        [label, *(format_figure(found[name, times * length]) for times in published.times)]
        for label, name in published.labels.items()
        if (name, length) in found
    ]


def format_figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def check_claims(published: Published, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every claim with what was seen of it here."""
    known = {(pair["first"], pair["second"], pair["times"]): pair for pair in pairs}
    return [describe_claim(claim, published.labels, known) for claim in published.claims()]


def describe_claim(
    claim: Claim, labels: Mapping[str, str], known: Mapping[tuple[str, str, int], dict[str, Any]]
) -> dict[str, Any]:
    better, worse = labels[claim.better], labels[claim.worse]
    same, other = known.get((better, worse, claim.times)), known.get((worse, better, claim.times))
    seen = SEEN if same and same["shown"] else OPPOSITE if other and other["shown"] else NOT_SHOWN
    at = "the trained length" if claim.times == 1 else f"{claim.times} times the trained length"
    statement = f"{claim.better} better than {claim.worse} at {at}: {seen}"
    return {"better": claim.better, "worse": claim.worse, "times": claim.times, "seen": seen, "statement": statement}


def describe_publication(published: Published, table: list[list[str]], claims: list[dict[str, Any]]) -> dict[str, Any]:
    """What was published beside ours, as JSON has it."""
    theirs = [[name, *map(format_figure, row)] for name, row in (published.table or {}).items()]
    ours = [times_name(times) for times in published.times]
    return {
        "published": {
            "source": published.source,
            "setting": published.setting,
            "columns": list(published.columns),
            "table": theirs,
        },
        "ours": {"columns": ours, "table": table, "what": "exact answers" if published.tasks else "perplexity"},
        "claims": claims,
    }


def times_name(times: int) -> str:
    return "the trained length" if times == 1 else f"{times} times it"


def add_publication(page: Page, result: dict[str, Any]) -> Page:
    """The section of a page with both tables, and what was seen of every claim."""
    theirs, ours = result["published"], result["ours"]
    page.heading(f"Published: {theirs['source']}").paragraph(theirs["setting"])
    if theirs["table"]:
        page.table(["published", *theirs["columns"]], theirs["table"])
    page.table(["ours", *ours["columns"]], ours["table"], f"Ours: {ours['what']}, another model and other data")
    page.heading("Claimed orders").table(
        ["claim", "at", "here"],
        [[f"{c['better']} better than {c['worse']}", times_name(c["times"]), c["seen"]] for c in result["claims"]],
    )
    return page.paragraph(describe_orders(result))


def print_publication(result: dict[str, Any], out: Path) -> None:
    for task in result.get("tasks", {}).values():
        print_result(task, out)
    if "tasks" not in result:
        print_result(result, out)
    theirs, ours = result["published"], result["ours"]
    if theirs["table"]:
        show_table(f"published: {theirs['source']}", ["published", *theirs["columns"]], theirs["table"])
    show_table(f"ours, {ours['what']}", ["ours", *ours["columns"]], ours["table"])
    show_text(f"claimed by {theirs['source']}", [claim["statement"] for claim in result["claims"]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PUBLISHED, help="the published result")
    add_options(parser)
    given = parser.parse_args()
    chosen = given_settings(given)
    chosen |= {"device": given.device, "command": shlex.join(sys.argv), "evaluating": Bar}
    progress = progress_display()
    try:
        result = reproduce(given.name, given.out, progress=progress, **chosen)
    except StoppedError as stopped:
        print(stopped)
        return stopped.exit_code
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        progress.close()
    if given.json:
        print_json(result)
    else:
        print_publication(result, Path(given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
