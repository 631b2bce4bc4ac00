"""The view "runs": loss curves of runs, also while they train, and reports of `evaluate --lengths` and `compare`."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from phasor.config import ModelConfig
from phasor.lab.endpoints import LabRequest, bounded_field, register
from phasor.lab.folders import LENGTHS, Folder, Folders

METRICS, MANIFEST = "metrics.jsonl", "phasor_manifest.json"
LIVE_SECONDS = 120  # since the last line of a run that is still taken to be training
MAX_RUNS, MAX_BYTES = 64, 256 << 20  # runs that are shown, bytes of metrics that are read of one
LARGEST = 1e300  # that can be drawn
TASK_NAMES = {
    "lm": ("language model", "语言模型"),
    "translation": ("translation", "翻译"),
    "mlm": ("masked language model", "掩码语言模型"),
    "classify": ("classifier", "分类"),
    "embed": ("embeddings", "嵌入"),
    "distill": ("distilled language model", "蒸馏语言模型"),
    "chat": ("conversations", "对话"),
    "preference": ("preferences", "偏好"),
}
TRAIN, VALID = "loss", "validation_loss"
# Fields of a recipe's data that change no validation loss.
INDIFFERENT = ("cache", "workers", "pad_to_multiple_of", "replace_tokenizer")


class CurvesRequest(LabRequest):
    """The curves of a metric; where `revision` is that of the answer before, and nothing is new, none are sent.

    `points` bounds how many points of a curve are sent: of more, the lowest and the highest of each bin are.
    """

    metric: str = bounded_field(TRAIN, 1, 80)
    points: int = bounded_field(600, 4, 4000)
    revision: str = bounded_field("", maximum=80)


class ReportRequest(LabRequest):
    """The report of `evaluate --lengths` in a folder."""

    folder: int = bounded_field(0, 0)


class MetricsFile:
    """metrics.jsonl of a run as it grows: what was read stays, and only new lines are read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "metrics.jsonl")
    ...     _ = file.write_text('{"step": 10, "loss": 2.5}\\n{"step": 20, "lo')
    ...     metrics = MetricsFile(file)
    ...     metrics.update()
    ...     metrics.curves["loss"]
    ([10], [2.5])
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.restart(None)

    def restart(self, identity: tuple[int, int] | None) -> None:
        """Forget what was read: the run was resumed or begun again, with another file."""
        self.identity, self.offset, self.rest, self.step = identity, 0, b"", 0
        self.curves: dict[str, tuple[list[int], list[float]]] = {}

    def update(self) -> None:
        """Read the lines that are new."""
        with open_regular_file(self.file) as file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino)
            if identity != self.identity or found.st_size < self.offset:
                self.restart(identity)
            if found.st_size > MAX_BYTES:
                raise ValueError(f"{self.file.name} has more than {MAX_BYTES >> 20} MiB, which are not shown")
            file.seek(self.offset)
            new = file.read(found.st_size - self.offset)
            self.offset += len(new)
            *lines, self.rest = (self.rest + new).split(b"\n")
            for line in lines:
                self.add(line)

    def add(self, text: bytes) -> None:
        """Add the numbers of a line; one that a kill cut short is left out."""
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        step = line.get("step") if isinstance(line, dict) else None
        if not is_number(step):
            return
        step = int(step)
        self.step = max(self.step, step)
        for name, value in line.items():
            if name != "step" and is_number(value):
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))


def is_number(value: object) -> TypeGuard[float]:
    """Whether something out of a file can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def open_regular_file(file: Path) -> Any:
    """A file of a run, opened for bytes; pipes, devices and links are refused."""
    from phasor.config.text_files import open_regular

    return open_regular(file, file.name)


FILES: dict[Path, MetricsFile] = {}  # of all runs that were asked for


def read_metrics(folder: Folder) -> MetricsFile:
    """The metrics of a run as they are now; none before its first line."""
    file = folder.file(METRICS)
    metrics = FILES.setdefault(file, MetricsFile(file))
    if file.exists():
        metrics.update()
    return metrics


def read_curves(request: CurvesRequest, folders: Folders) -> dict[str, Any]:
    """What each run is, whether it trains, and its curve of a metric; with "loss", that of validation as well."""
    found = [folder for folder in folders.list() if folder.is_run]
    reports = [{"folder": folder.number, "name": folder.name} for folder in folders.list() if folder.is_report]
    runs = [describe_run(folder, request) for folder in found[:MAX_RUNS]]
    revision = hashlib.sha256(json.dumps([request.metric, runs, reports]).encode()).hexdigest()
    if revision == request.revision:
        return {"revision": revision, "changed": False}
    return {
        "revision": revision,
        "changed": True,
        "runs": runs,
        "left_out": max(len(found) - MAX_RUNS, 0),
        "reports": reports,
        "metrics": sorted({name for run in runs for name in run.get("metrics", ())}),
    }


def describe_run(folder: Folder, request: CurvesRequest) -> dict[str, Any]:
    """A run: its recipe in short, its state and its curves; or why it cannot be read."""
    from phasor.checkpoints.runs import RunMarker

    about: dict[str, Any] = {"folder": folder.number, "name": folder.name}
    try:
        marker = RunMarker.read(folder.path)
        metrics = read_metrics(folder)
        state = run_state(folder)
    except (ValueError, OSError) as error:
        return {**about, "error": folder.error_text(error)}
    if marker is None:
        return {**about, "error": f"{folder.name}/run.json is not the marker of a run"}
    recipe = marker.recipe
    task, data = recipe.get("task", ""), recipe.get("data") or {}
    names = [request.metric, VALID] if request.metric == TRAIN else [request.metric]
    curves = {name: downsample(*metrics.curves[name], request.points) for name in names if name in metrics.curves}
    final = {name: values[-1] for name, (_, values) in metrics.curves.items() if name in (TRAIN, VALID)}
    return {
        **about,
        "task": dict(zip(("en", "zh"), TASK_NAMES.get(task, (task, task)), strict=True)),
        "data": {name: data.get(name) for name in ("tokenizer", "sequence_length")} | {"name": data_name(data)},
        "validation": validation_key(recipe),
        "position": position_kind(recipe),
        "steps": (recipe.get("train") or {}).get("steps"),
        "step": metrics.step,
        "state": state,
        "last": final,
        "best": lowest(metrics.curves.get(VALID)),
        "metrics": sorted(metrics.curves),
        "curves": curves,
    }


def data_name(data: Mapping[str, Any]) -> str:
    """What a run is validated on, in short: the name of a file, or the format of data that are generated.

    >>> data_name({"train": "texts/notes.txt", "valid": None}), data_name({"format": "python"})
    ('notes.txt', 'python')
    """
    path = data.get("valid") or data.get("train")
    return Path(path).name if path else str(data.get("format"))


def validation_key(recipe: Mapping[str, Any]) -> str:
    """The same for runs whose validation losses can be compared: their task, their data and how it becomes tokens."""
    data = {name: value for name, value in (recipe.get("data") or {}).items() if name not in INDIFFERENT}
    tokenizer_of = recipe.get("init_from") if data.get("tokenizer") == "auto" else None
    what = json.dumps([recipe.get("task"), data, tokenizer_of], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:12]


def position_kind(recipe: Mapping[str, Any]) -> str | None:
    """The position scheme of a run's model: its recipe's, its preset's or the default; None if it is another model's.

    >>> position_kind({"model": {"preset": "llama-2"}}), position_kind({"model": {"position": "alibi"}})
    ('rotary', 'alibi')
    """
    from phasor.models.presets import PRESETS, preset

    model = recipe.get("model") or {}
    given, name = model.get("position"), model.get("preset")
    kind = given.get("kind") if isinstance(given, Mapping) else given
    if kind is not None or recipe.get("init_from") is not None:
        return kind
    if name is None:
        return ModelConfig(vocab_size=1, dim=2, num_layers=1, num_heads=1).position.kind
    return preset(name).position.kind if name in PRESETS else None


def run_state(folder: Folder) -> str:
    """ "finished" (it has written its model), "training" (there was a line in the last two minutes), or "stopped"."""
    if folder.has(MANIFEST):  # it ended by itself or by a signal
        return "finished" if folder.has("model") else "stopped"
    try:
        modified = max(os.stat(folder.path / name).st_mtime for name in ("run.json", METRICS))
    except OSError:
        modified = os.stat(folder.path / "run.json").st_mtime
    return "training" if time.time() - modified < LIVE_SECONDS else "stopped"


def lowest(curve: tuple[list[int], list[float]] | None) -> dict[str, Any] | None:
    """The lowest value of a curve, and its step."""
    if curve is None:
        return None
    steps, values = curve
    index = min(range(len(values)), key=values.__getitem__)
    return {"step": steps[index], "value": values[index]}


def downsample(steps: list[int], values: list[float], points: int) -> dict[str, list[Any]]:
    """A curve with at most `points` points: the ends, and of each bin of steps the lowest and the highest.

    >>> downsample([1, 2, 3, 4, 5, 6], [3.0, 9.0, 2.0, 2.5, 1.0, 1.5], 4)
    {'steps': [1, 2, 5, 6], 'values': [3.0, 9.0, 1.0, 1.5]}
    """
    count = len(values)
    kept: Sequence[int] = range(count)
    if count > points:
        bins = (points - 2) // 2
        edges = [index * count // bins for index in range(bins + 1)]
        chosen = {0, count - 1}
        for start, end in pairwise(edges):
            indices = range(start, end)
            chosen |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
        kept = sorted(chosen)
    return {"steps": [steps[index] for index in kept], "values": [values[index] for index in kept]}


def read_report(request: ReportRequest, folders: Folders) -> dict[str, Any]:
    """A report of `evaluate --lengths`: losses with their intervals, differences, orders, the loss by position."""
    from phasor.config.text_files import from_json, read_text
    from phasor.evaluation.lengths_report import describe_protocol, order_chains

    folder = folders.get(request.folder)
    if not folder.is_report:
        raise ValueError(f"folder {request.folder}, {folder.name}, holds no report of phasor evaluate --lengths")
    try:
        report = from_json(read_text(folder.file(LENGTHS), "the report"), folder.file(LENGTHS))
        found = {
            "folder": folder.number,
            "name": folder.name,
            **{name: report[name] for name in ("model", "data", "protocol", "lengths", "trained_length", "baseline")},
            "names": dict(report["names"]),
            "rows": [
                {name: row[name] for name in ("extension", "length", "factor", "loss", "difference")}
                for row in report["rows"]
            ],
            "orders": [
                {"length": length, "chains": [{"names": chain, "shown": shown} for chain, shown in chains]}
                for length in report["lengths"]
                for chains in [order_chains(report, length)]
            ],
            "how": describe_protocol(report).en,
            "documents": report["documents"]["used"],
            **{name: report[name] for name in ("targets", "targets_per_row", "stride", "row_count", "units", "unit")},
            "positions": {name: report["positions"][name] for name in ("length", "edges", "loss")},
            "notes": list(report["notes"]),
        }
        json.dumps(found, allow_nan=False)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder.name}/{LENGTHS} is not a report of phasor evaluate --lengths") from error
    except (ValueError, OSError) as error:
        raise ValueError(folder.error_text(error)) from error
    return found


register("runs", "curves", CurvesRequest, read_curves, folders=True)
register("runs", "report", ReportRequest, read_report, folders=True)
