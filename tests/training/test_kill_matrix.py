"""Runs of every task, killed at their operations on files and in the middle of writes, and resumed bit by bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import kill_points
import pytest
from processes import forkserver

POINTS = 40  # per task


def start(made: Any, resume: bool, point: int | None, report: Path) -> int | None:
    """Run in a separate process, and how it ended."""
    process = forkserver().Process(target=kill_points.run_and_die, args=(made.to_json(), resume, point, str(report)))
    process.start()
    process.join(300)
    return process.exitcode


def contents(folder: Path) -> dict[str, Any]:
    """What has to be the same in a run that was never killed: every tensor, token and metric, and nothing besides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("model/*", "checkpoints/*/*.safetensors", "data/*.tokens", "reference/*.safetensors")
    same = [file for pattern in kept for file in folder.glob(pattern)]
    return {
        "metrics": [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines],
        "files": {str(file.relative_to(folder)): file.read_bytes() for file in same},
        "names": sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if "events" not in path.parts and not is_empty_part(path)
        ),
        "samples": [file.read_text() for file in folder.glob("samples.txt")],
    }


def is_empty_part(path: Path) -> bool:
    """What a kill leaves before the first byte of the first file: nobody can tell whose it is, so it stays."""
    return path.match(".run.json-*.part") and path.stat().st_size == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of a task that was never killed, the number of its operations on files, and the model it began with."""
    made: dict[str, tuple[dict[str, Any], int, Path]] = {}

    def get(task: str) -> tuple[dict[str, Any], int, Path]:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            kill_points.write_texts(folder)
            base = kill_points.write_base(folder)
            assert start(kill_points.recipe(task, folder, "run", base), False, None, folder / "report") == 0
            made[task] = contents(folder / "run"), json.loads((folder / "report").read_text())["points"], base
        return made[task]

    return get


def check(task: str, number: int, tmp_path: Path, whole: Any, *, twice: bool) -> None:
    """Kill a run at one of the points, perhaps kill it again when it is resumed, and let it end."""
    expected, points, base = whole(task)
    kill_points.write_texts(tmp_path)
    made, report = kill_points.recipe(task, tmp_path, "run", base), tmp_path / "report"
    point = 1 + (points - 1) * number // (POINTS - 1)
    assert start(made, False, point, report) == -signal.SIGKILL
    for again in (1 + point * 7 % points, None) if twice else (None,):
        resume = (tmp_path / "run" / "run.json").exists()
        code = start(made, resume, again, report)
        assert code == 0 or (again is not None and code == -signal.SIGKILL), (point, again)
    assert contents(tmp_path / "run") == expected, point


@pytest.mark.sample(2)
@pytest.mark.parametrize("task", kill_points.TASKS)
@pytest.mark.parametrize("number", [27])
def test_a_run_killed_at_an_operation_on_its_files_ends_as_if_it_had_not_been(
    task: str, number: int, tmp_path: Path, whole: Any
) -> None:
    check(task, number, tmp_path, whole, twice=False)


@pytest.mark.slow
@pytest.mark.parametrize("task", kill_points.TASKS)
@pytest.mark.parametrize("number", range(POINTS))
def test_runs_killed_at_160_operations_and_in_writes_end_as_if_they_had_not_been(
    task: str, number: int, tmp_path: Path, whole: Any
) -> None:
    check(task, number, tmp_path, whole, twice=number % 2 == 0)
