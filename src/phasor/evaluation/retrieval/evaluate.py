"""`evaluate_retrieval`: exact match and log-probability of answers, by task, extension, length and depth."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasor.checkpoints.swap_positions import swap_config
from phasor.config.schema import check_integer, plural
from phasor.evaluation.continuations import BATCH_TOKENS, ContinuationScore, check_scorable, score_continuations
from phasor.evaluation.intervals import Interval, binomial_interval
from phasor.evaluation.length_settings import parse_lengths
from phasor.evaluation.report import Text, check_out, provenance, write_report
from phasor.evaluation.retrieval.prompts import PromptBuilder, PromptPieces
from phasor.evaluation.retrieval.tasks import RetrievalTask, find_tasks
from phasor.evaluation.rows import EvaluatedModel, open_evaluated_model
from phasor.evaluation.run import known_limits
from phasor.evaluation.variants import OWN, Variant, check_variants, make_variant, variant_names
from phasor.generation.translation import Progress
from phasor.models.extensions import trained_length
from phasor.transformer import Transformer

DEPTHS, TRIALS = 5, 10
DATA, CHART, PAGE = "retrieval.json", "retrieval.png", "retrieval.html"
WIDE = 0.3  # an interval from which on a note says how wide it is


def evaluate_retrieval(
    model: str | Path | Transformer,
    tasks: Sequence[str] | str,
    *,
    lengths: Sequence[int | str] | str,
    extensions: Sequence[str] | str = (OWN,),
    depths: int = DEPTHS,
    trials: int = TRIALS,
    haystack: str | Path | None = None,
    seed: int = 0,
    checkpoint: str | int | None = None,
    part: str | None = None,
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    out: str | Path | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """How often a decoder finds what is hidden in a prompt, by the prompt's length and the depth of the needle.

    `model` is any folder that `phasor.load` reads (or its `part`), a run, or a model; `tasks` are names of `TASKS`,
    such as "passkey". Prompt and answer together have exactly as many tokens as each of `lengths` says; a prompt that
    does not fit is refused. `depths` is the number of depths, evenly from 0, the beginning of the haystack, to 1,
    right before the question. `extensions` are as in `evaluate_lengths`, each made for the largest length; the model
    as it was saved is always beside them.

    Every cell of the map has `trials` prompts, which are the same for every extension: a function of `seed`, the task,
    the length, the depth and the number of the trial. The haystack repeats a few sentences, or is cut from the text or
    token file `haystack`. An answer counts where greedy decoding writes exactly its tokens, with Wilson's interval at
    95 %; `log_probability` is the mean of the answers', in nats. `out` is a folder for a page, a chart and JSON.

    >>> from phasor import preset
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=261, max_length=64))
    >>> model.tokenizer = byte_tokenizer()
    >>> result = evaluate_retrieval(model, "recall", lengths="64,128", extensions="none,yarn", depths=2, trials=3)
    >>> [(row["extension"], row["length"], row["depth"], row["trials"]) for row in result["cells"]][-2:]
    [('yarn', 128, 0.0, 3), ('yarn', 128, 1.0, 3)]
    """
    chosen = find_tasks(split_names(tasks))
    names = list(dict.fromkeys(split_names(extensions)))
    check_variants(names)
    sizes = parse_lengths(lengths)
    for name, value in (("depths", depths), ("trials", trials), ("batch_tokens", batch_tokens)):
        check_integer(name, value, below=1 << 31)
    folder = check_out(out, (DATA, CHART, PAGE))
    evaluated = open_evaluated_model(model, device, checkpoint, part)
    variants = make_variants(evaluated.model, names, sizes)
    builder = PromptBuilder(evaluated.model, haystack, sizes[-1])
    places = [0.5] if depths == 1 else [index / (depths - 1) for index in range(depths)]
    cells = [Cell(task, length, depth) for task in chosen for length in sizes for depth in places]
    pieces = {cell: [cell.encode(builder, seed, trial) for trial in range(trials)] for cell in cells}  # or refused
    total, done = len(variants) * len(cells) * trials, 0
    report = progress or (lambda done, total: None)
    rows = []
    for name, (config, _) in variants.items():
        current = evaluated.model if config == evaluated.model.config else swap_config(evaluated.model, config)
        for cell in cells:
            scores = score_cell(current, builder, cell, pieces[cell], seed, batch_tokens)
            rows.append(describe_cell(cell, name, scores))
            done += trials
            report(done, total)
    result = describe(evaluated, chosen, sizes, places, trials, haystack, seed, variants, rows, command)
    if folder is not None:
        from phasor.evaluation.retrieval.heat_map import chart, page

        png, svg = chart(result)
        write_report(folder, {DATA: json.dumps(result, indent=2), CHART: png, PAGE: page(result, svg)})
    return result


def split_names(names: Sequence[str] | str) -> list[str]:
    """
    >>> split_names("none, yarn"), split_names(["none"])
    (['none', 'yarn'], ['none'])
    """
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def make_variants(model: Transformer, names: Sequence[str], lengths: Sequence[int]) -> dict[str, Variant]:
    """The configurations that are compared, for the largest length; what the model cannot read is refused.

    The model as it was saved is always among them.
    """
    check_scorable(model)
    limit = min(known_limits(model), default=lengths[-1])
    if lengths[-1] > limit:
        raise ValueError(
            f"--lengths {lengths[-1]:,} is beyond this model's table of {limit:,} positions, which has no more"
        )
    found = {name: make_variant(model.config, name, lengths[-1]) for name in names}
    plain = any(variant.config == model.config for variant in found.values())
    return found if plain else {OWN: Variant(model.config), **found}


@dataclass(frozen=True)
class Cell:
    """A place of the map: a task at a length and a depth."""

    task: RetrievalTask
    length: int
    depth: float

    def random(self, seed: int, trial: int, use: str) -> random.Random:
        """The random numbers of a trial: those of its text, or those of its haystack."""
        return random.Random(f"{seed} {self.task.name} {self.length} {self.depth} {trial} {use}")

    def encode(self, builder: PromptBuilder, seed: int, trial: int) -> PromptPieces:
        return builder.encode(self.task, self.length, self.depth, self.random(seed, trial, "text"))


def score_cell(
    model: Transformer,
    builder: PromptBuilder,
    cell: Cell,
    pieces: Sequence[PromptPieces],
    seed: int,
    batch_tokens: int,
) -> list[ContinuationScore]:
    """The scores of the answers of a cell's trials; only the prompts of a batch are held as tokens."""
    rows = max(1, batch_tokens // cell.length)
    scores: list[ContinuationScore] = []
    for start in range(0, len(pieces), rows):
        batch = enumerate(pieces[start : start + rows], start)
        prompts = [builder.join(cell.task, piece, cell.random(seed, trial, "haystack")) for trial, piece in batch]
        scores += score_continuations(model, prompts, batch_rows=rows)
    return scores


def describe_cell(cell: Cell, name: str, scores: Sequence[ContinuationScore]) -> dict[str, Any]:
    correct = sum(score.greedy for score in scores)
    return {
        "task": cell.task.name,
        "extension": name,
        "length": cell.length,
        "depth": cell.depth,
        "trials": len(scores),
        "correct": correct,
        "exact_match": binomial_interval(correct, len(scores)).to_dict(),
        "log_probability": sum(score.log_probability for score in scores) / len(scores),
    }


def all_depths(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same over all depths of a task, an extension and a length."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["extension"], row["length"]), []).append(row)
    for (task, extension, length), group in groups.items():
        trials, correct = (sum(row[name] for row in group) for name in ("trials", "correct"))
        yield {
            "task": task,
            "extension": extension,
            "length": length,
            "trials": trials,
            "correct": correct,
            "exact_match": binomial_interval(correct, trials).to_dict(),
            "log_probability": sum(row["log_probability"] for row in group) / len(group),
        }


def describe(
    evaluated: EvaluatedModel,
    tasks: Sequence[RetrievalTask],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    haystack: str | Path | None,
    seed: int,
    variants: dict[str, Variant],
    rows: list[dict[str, Any]],
    command: str | None,
) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "model": evaluated.name,
        "tasks": {task.name: task.summary for task in tasks},
        "lengths": list(lengths),
        "depths": list(depths),
        "trials": trials,
        "haystack": None if haystack is None else str(haystack),
        "trained_length": trained_length(evaluated.model.config),
        "extensions": {name: variant_names()[name] for name in variants},
        "factors": {name: variant.factor for name, variant in variants.items()},
        "cells": rows,
        "all_depths": list(all_depths(rows)),
        "notes": [note.en for note in notes(trials, len(depths))],
        "notes_zh": [note.zh for note in notes(trials, len(depths))],
        "provenance": provenance(
            command,
            evaluated.model.tokens.weight.device,
            dtype=str(evaluated.model.tokens.dtype).removeprefix("torch."),
            seed=seed,
        ),
    }


def notes(trials: int, depths: int) -> list[Text]:
    """What a reader must know beside the numbers: how wide the intervals can be.

    >>> notes(10, 5)[0].en
    'a cell has 10 trials: its 95 % interval is up to 53 points wide, and 10 of 10 is 72 % to 100 %'
    """
    said = []
    cell, whole = widest(trials), widest(trials * depths)
    if cell.high - cell.low > WIDE:
        full = binomial_interval(trials, trials)
        wide, least = f"{100 * (cell.high - cell.low):.0f}", f"{100 * full.low:.0f} %"
        said.append(
            Text(
                f"a cell has {plural(trials, 'trial')}: its 95 % interval is up to {wide} points wide, and "
                f"{trials:,} of {trials:,} is {least} to 100 %",
                f"一个格子有 {trials:,} 次试验：其 95 % 区间最宽 {wide} 个百分点，"
                f"{trials:,} 次全对意味着 {least} 至 100 %",
            )
        )
    if whole.high - whole.low > WIDE:
        wide = f"{100 * (whole.high - whole.low):.0f}"
        said.append(
            Text(
                f"all depths of a length together are up to {wide} points wide",
                f"一个长度的所有深度合起来，区间最宽 {wide} 个百分点",
            )
        )
    return said


def widest(trials: int) -> Interval:
    return binomial_interval(trials // 2, trials)
