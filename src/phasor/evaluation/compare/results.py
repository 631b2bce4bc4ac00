"""What came of a comparison, over schemes and seeds: means, their spread, and the orders that are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.config import PositionConfig
from phasor.data.tasks import TASKS
from phasor.evaluation.compare.schemes import JOIN, ComparedScheme, state_kinds
from phasor.evaluation.compare.settings import CompareSettings
from phasor.evaluation.intervals import binomial_interval, compare_lengths, paired_interval
from phasor.evaluation.lengths import finite
from phasor.evaluation.report import Text, chinese
from phasor.evaluation.variants import NONE, WINDOW, variant_names
from phasor.nn.positions.texts import read_texts

Parts = Mapping[tuple[str, int], Mapping[str, Any]]  # what was measured, by scheme and seed
Values = dict[tuple[str, int], NDArray[np.float64]]  # `[seeds, units]`, by label and length


def combine_texts(settings: CompareSettings, parts: Parts) -> dict[str, Any]:
    """The losses of all schemes as `evaluate_lengths` writes those of one model, with the spread over seeds.

    Units (documents or rows) and their targets are the same for all schemes. Intervals are over units, of the mean over
    seeds; `seeds` of a row are the means of each seed.
    """
    first = next(iter(parts.values()))
    weights = first["unit_weights"]
    values, factors, descriptions = gather_losses(settings, parts)
    labels = list(descriptions)
    plain = [scheme.name for scheme in settings.schemes]
    extended = next((scheme.name for scheme in settings.schemes if scheme.has_extensions), None)
    with_window = [scheme.name for scheme in settings.schemes if not scheme.keeps_state]
    baseline = f"{extended or with_window[0]} ({WINDOW})"
    rows = []
    for label in labels:
        for length in settings.lengths:
            each = values[label, length]
            loss = paired_interval(each.mean(0).tolist(), weights)
            against = (each - values[baseline, length]).mean(0).tolist()
            since = (each - values[label, settings.lengths[0]]).mean(0).tolist()
            rows.append(
                {
                    "extension": label,
                    "length": length,
                    "factor": factors[label, length],
                    "loss": loss.to_dict(),
                    "perplexity": finite(math.exp(min(loss.estimate, 700))),
                    "difference": None if label == baseline else paired_interval(against, weights).to_dict(),
                    "change": paired_interval(since, weights).to_dict(),
                    "seeds": [finite(float(np.average(row, weights=weights))) for row in each],
                    "losses": each.mean(0).tolist(),
                }
            )
    own = {short_name(label): label for label in labels if label.partition(" (")[0] == extended}
    variants = {(short, length): values[label, length] for short, label in own.items() for length in settings.lengths}
    said = text_notes(settings)
    copied = ("protocol", "lengths", "targets_per_row", "stride", "bos", "documents", "row_count", "targets")
    return {
        "data": settings.data or "the sources of Python's standard library",
        **{name: first[name] for name in copied},
        "trained_length": settings.length,
        "original_length": settings.length,
        "factor": first["factor"],
        "unit": first["unit"],
        "units": first["units"],
        "unit_weights": weights,
        "baseline": baseline,
        "schemes": plain,
        "seeds": settings.seeds,
        "names": {label: text.en for label, text in descriptions.items()},
        "names_zh": {label: text.zh for label, text in descriptions.items()},
        "rows": rows,
        "orders": compare_lengths(values, [*plain, baseline], settings.lengths, weights),
        "extended": extended,
        "extension_orders": compare_lengths(variants, list(own), settings.lengths, weights),
        "positions": combine_positions(settings, parts),
        "notes": [*(note.replace("--limit", "--rows") for note in first["notes"]), *(note.en for note in said)],
        "notes_zh": [*(note.replace("--limit", "--rows") for note in first["notes_zh"]), *(note.zh for note in said)],
    }


def short_name(label: str) -> str:
    """What a model of the scheme with extensions is called among its like.

    >>> short_name("rotary (yarn)"), short_name("rotary")
    ('yarn', 'none')
    """
    return label.partition(" (")[2].removesuffix(")") or NONE


def gather_losses(
    settings: CompareSettings, parts: Parts
) -> tuple[Values, dict[tuple[str, int], float | None], dict[str, Text]]:
    """The losses by label and length, the factors of extensions, and what every label is."""
    values: Values = {}
    factors: dict[tuple[str, int], float | None] = {}
    descriptions: dict[str, Text] = {}
    for scheme in settings.schemes:
        each = [parts[scheme.name, seed] for seed in range(settings.seeds)]
        for extension in each[0]["names"]:
            if extension == WINDOW and scheme.keeps_state:
                continue
            label = scheme.label(extension)
            descriptions[label] = describe_label(scheme, extension)
            for length in settings.lengths:
                found = [row_of(part, extension, length) for part in each]
                values[label, length] = np.array([row["losses"] for row in found])
                factors[label, length] = found[0]["factor"]
    return values, factors, descriptions


def row_of(part: Mapping[str, Any], extension: str, length: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        row for row in part["rows"] if (row["extension"], row["length"]) == (extension, length)
    )
    return found


def describe_label(scheme: ComparedScheme, extension: str) -> Text:
    english = variant_names()[extension]
    if scheme.label(extension) != scheme.name:
        return Text(f"{scheme.name}, {english}", f"{scheme.name}，{chinese.MODELS.get(extension, english)}")
    kinds = scheme.kind.split(JOIN)
    texts = [read_texts((PositionConfig.kinds | state_kinds())[kind]) for kind in kinds]
    lines = {language: [text[language]["summary"].rstrip(".") for text in texts] for language in ("en", "zh")}
    what = Text("; ".join(lines["en"]), "；".join(lines["zh"]))
    fields = "".join(f", {name} {value}" for name, value in scheme.fields)
    if scheme.method is None:
        return Text(what.en + fields, what.zh + fields)
    return Text(
        f"{what.en}; fine-tuned at the largest length with {scheme.method}{fields}",
        f"{what.zh}；在最大长度上用 {scheme.method} 微调{fields}",
    )


def combine_positions(settings: CompareSettings, parts: Parts) -> dict[str, Any]:
    """The loss by position at the largest length, the mean over seeds."""
    first = next(iter(parts.values()))["positions"]
    curves: dict[str, list[float | None]] = {}
    for scheme in settings.schemes:
        each = [parts[scheme.name, seed]["positions"]["loss"] for seed in range(settings.seeds)]
        for extension in each[0]:
            means = np.mean([[math.nan if y is None else y for y in one[extension]] for one in each], axis=0)
            curves[scheme.label(extension)] = [finite(value) for value in means.tolist()]
    return {"length": first["length"], "edges": first["edges"], "loss": curves}


def text_notes(settings: CompareSettings) -> list[Text]:
    """What a reader must know of the schemes and seeds."""
    said = []
    reached = settings.length
    tables = {scheme.name: scheme.table_rows(reached, settings.lengths[-1]) for scheme in settings.schemes}
    said += [
        Text(
            f"the table of {name!r} has {rows:,} rows, of which training reached {reached:,}: the others are as "
            "they were drawn",
            f"{name!r} 的表有 {rows:,} 行，训练只到达其中 {reached:,} 行：其余仍是初始值",
        )
        for name, rows in tables.items()
        if rows is not None
    ]
    if settings.seeds == 1:
        said.append(
            Text(
                "one seed: orders hold for these trained models, and say nothing of others trained the same way",
                "只有一个随机种子：次序只对这些训练好的模型成立，不说明同样训练的其他模型",
            )
        )
    return said


def combine_tasks(settings: CompareSettings, parts: Parts) -> dict[str, Any]:
    """The shares of exact answers, with binomial intervals over the problems of all seeds, and their spread."""
    assert settings.task is not None
    task = TASKS[settings.task]
    names = [scheme.name for scheme in settings.schemes]
    rows, wrong = [], {}
    for name in names:
        for size in settings.lengths:
            exact = np.array([parts[name, seed]["exact"][str(size)] for seed in range(settings.seeds)])
            wrong[name, size] = 1.0 - exact
            rows.append(
                {
                    "scheme": name,
                    "size": size,
                    "exact": binomial_interval(int(exact.sum()), exact.size).to_dict(),
                    "seeds": exact.mean(1).tolist(),
                }
            )
    notes = text_notes(settings)[-1:] if settings.seeds == 1 else []
    if task.chance:
        share = f"{100 * task.chance:.0f} %"
        notes.append(Text(f"a guess is right in {share} of the problems", f"随机猜测能答对 {share} 的题目"))
    return {
        "task": settings.task,
        "item": task.item,
        "trained_size": settings.length,
        "lengths": list(settings.lengths),
        "schemes": names,
        "seeds": settings.seeds,
        "problems": settings.rows,
        "rows": rows,
        "orders": compare_lengths(wrong, names, settings.lengths),
        "notes": [note.en for note in notes],
        "notes_zh": [note.zh for note in notes],
    }
