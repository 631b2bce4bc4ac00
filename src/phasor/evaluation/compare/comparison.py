"""`compare`: train the same decoder with each position scheme on the same data, and measure it at longer lengths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from phasor.config.schema import plural
from phasor.device import resolve_device
from phasor.evaluation.compare.problems import check_task, measure_task, task_fingerprint, train_task
from phasor.evaluation.compare.results import combine_tasks, combine_texts
from phasor.evaluation.compare.schemes import ComparedScheme
from phasor.evaluation.compare.settings import CompareSettings, check_compare_settings
from phasor.evaluation.compare.state import ComparisonFolder
from phasor.evaluation.compare.texts import check_schemes, measure_run, prepare_texts, scheme_recipe, train_recipe
from phasor.evaluation.report import Page, Text, provenance, write_report
from phasor.generation.translation import Progress
from phasor.training.progress import TrainingProgress

Evaluating = Callable[[str], Progress]  # a progress bar by what is evaluated
TEXT_FILE, TASK_FILE, PAGE = "lengths.json", "tasks.json", "compare.html"
CHARTS = ("ranking", "compare", "difference", "extensions")


class StoppedError(Exception):
    """A signal ended a run, whose checkpoint is saved; `exit_code` is what a command should end with."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def compare(
    out: str | Path,
    *,
    command: str | None = None,
    progress: TrainingProgress | None = None,
    evaluating: Evaluating | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare position schemes, and write a report to the folder `out`: a page, charts and JSON.

    The options, all with defaults:

    - `schemes`: names of position schemes, or "all". Rotary is measured with every extension too. Or a `question`
      about rotary, which compares its variants: "subspaces", "base" or "decay".
    - `data`, `valid`: texts as training reads them; without them, the sources of Python's standard library. Or
      `task`: "copy", "reverse", "addition", "sort", "parity" or "recall". On a task, `NAME:randomized` has
      randomized positions, and `NAME:coupled` those of an addition coupled.
    - `length`: how many tokens of a text, or items of a problem, are trained on. Texts are measured to 16 times as
      many tokens, under a `protocol` of `evaluate_lengths`, and problems to 4 times as many items.
    - `seeds`: how often each is trained. `steps`, `size` ("small", "large"), `rows`, `tokenizer`, `join`, `device`.

    The same call goes on with a comparison that was stopped, and with more schemes or seeds adds to it. Other settings,
    or data that have changed, are refused. An order of two schemes is stated where the paired interval of every seed
    excludes 0.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     options = {"task": "addition", "length": 2, "steps": 2, "rows": 4, "device": "cpu"}
    ...     result = compare(f"{place}/report", schemes="rotary,learned:coupled", **options)
    >>> [(row["scheme"], row["size"]) for row in result["rows"]][3:6]
    [('rotary', 8), ('learned:coupled', 2), ('learned:coupled', 4)]
    """
    settings = check_compare_settings(**options)
    with open_comparison(out, settings) as folder:
        result = run_comparison(settings, folder, progress or TrainingProgress(), evaluating or (lambda what: ignore))
        result["provenance"] = describe_provenance(settings, result, command)
        write_comparison(folder.path, result)
    return result


def open_comparison(out: str | Path, settings: CompareSettings) -> AbstractContextManager[ComparisonFolder]:
    """The folder of a comparison, after the settings were compared with what can be trained."""
    if settings.task is None:
        check_schemes(settings, Path(out))
    else:
        check_task(settings)
    data = TEXT_FILE if settings.task is None else TASK_FILE
    return ComparisonFolder.open(out, settings, (data, PAGE, *(f"{name}.png" for name in CHARTS)))


def ignore(done: int, total: int) -> None:
    """A progress bar that nobody sees."""


def run_comparison(
    settings: CompareSettings, folder: ComparisonFolder, progress: TrainingProgress, evaluating: Evaluating
) -> dict[str, Any]:
    """Train and measure what is not measured yet, and combine all of it."""
    texts = settings.task is None
    fingerprint = prepare_texts(settings, folder.path, progress) if texts else task_fingerprint(settings)
    folder.begin(fingerprint)
    parts: dict[tuple[str, int], dict[str, Any]] = {}
    diverged: list[tuple[str, int]] = []
    total = settings.seeds * len(settings.schemes)
    for seed in range(settings.seeds):
        for scheme in settings.schemes:
            number = len(parts) + len(diverged) + 1
            found = folder.read_measurement(scheme.name, seed)
            if found is None:
                progress.on_message(f"{scheme.name}, seed {seed} ({number} of {total})")
                found = measure_scheme(settings, scheme, seed, folder, progress, evaluating)
                folder.keep(scheme.name, seed, found)
            if found.get("diverged"):
                diverged.append((scheme.name, seed))
            else:
                parts[scheme.name, seed] = found
    kept = tuple(scheme for scheme in settings.schemes if all(name != scheme.name for name, _ in diverged))
    if not kept:
        raise ValueError(f"no scheme is left to compare: all of them diverged in {folder.path}")
    left = dataclasses.replace(settings, schemes=kept)
    result = combine_texts(left, parts) if settings.task is None else combine_tasks(left, parts)
    sizes = settings.sizes.model if settings.task is None else settings.sizes.task_model
    result["model"] = f"{plural(sizes['num_layers'], 'layer')} of {sizes['dim']} features"
    result["model_zh"] = f"{sizes['num_layers']} 层，{sizes['dim']} 维"
    result["steps"], result["fingerprint"] = settings.steps, fingerprint
    result["notes"] += [f"{name} diverged with seed {seed}, and is left out" for name, seed in diverged]
    result["notes_zh"] += [f"{name} 在随机种子 {seed} 下发散，未计入" for name, seed in diverged]
    return result


def measure_scheme(
    settings: CompareSettings,
    scheme: ComparedScheme,
    seed: int,
    folder: ComparisonFolder,
    progress: TrainingProgress,
    evaluating: Evaluating,
) -> dict[str, Any]:
    """Train one scheme with one seed, from where its run stands, and measure it."""
    place = folder.claim_run(scheme.name, seed)
    bar = evaluating(f"{scheme.name}, seed {seed}: evaluating")
    if settings.task is not None:
        model = train_task(settings, scheme, seed, place, progress)
        return measure_task(settings, scheme, model, bar)
    base = None if scheme.method is None else folder.run(scheme.kind, seed)
    trained = train_recipe(scheme_recipe(settings, scheme, seed, folder.path, base), place, progress)
    if trained is not None and trained.status == "diverged":
        return {"diverged": True}
    if trained is not None and trained.status != "finished":
        what = f"stopped at {scheme.name}, seed {seed}: the same command goes on from there"
        raise StoppedError(what, trained.exit_code)
    return measure_run(settings, place, scheme.extensions(), bar)


def describe_provenance(settings: CompareSettings, result: dict[str, Any], command: str | None) -> dict[str, Any]:
    """What a reader needs to get the numbers again."""
    return provenance(
        command,
        resolve_device(settings.device),
        seeds=", ".join(map(str, range(settings.seeds))),
        steps=settings.steps,
        tokenizer=settings.tokenizer,
        model=result["model"],
        data_sha256=result["fingerprint"],
    )


def write_comparison(folder: Path, result: dict[str, Any], first: Callable[[Page], Page] = lambda page: page) -> None:
    """The page, charts and JSON of a comparison; `first` adds to the page what stands before its figures."""
    from phasor.evaluation.compare.report import task_charts, task_page, text_charts, text_page

    on_text = "task" not in result
    charts = text_charts(result) if on_text else task_charts(result)
    page = (text_page if on_text else task_page)(result, {name: svg for name, (_, svg) in charts.items()}, first)
    pictures = {f"{name}.png": png for name, (png, _) in charts.items()}
    named = {"model": Text(result["model"], result["model_zh"])}
    html = page.provenance(result["provenance"] | named).html()
    data = json.dumps(result, indent=2)
    write_report(folder, {TEXT_FILE if on_text else TASK_FILE: data, **pictures, PAGE: html}, "comparison")
