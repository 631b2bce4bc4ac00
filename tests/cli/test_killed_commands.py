"""`phasor train` killed at random moments, from preparing its data to writing its model, and resumed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORDS = ["one", "two", "three", "four", "five", "six"]
TEXT = "".join(f"{a} and {b} make {c}.\n" for a in WORDS for b in WORDS for c in WORDS)
MODEL = "--model.dim 16 --model.num-heads 2 --model.num-layers 1 --model.hidden-dim 24 --model.dropout.residual 0.1"
DATA = "--data.train notes.txt --data.document line --data.vocab-size 300 --data.sequence-length 48 --data.workers 2"
TRAIN = "--train.device cpu --train.batch-tokens 96 --train.ema-decay 0.9 --train.evaluate-every 7"
ACCUMULATE = "--train.gradient-accumulation-steps 2"
SAVE = "--train.log-every 1 --save.every 1 --save.keep 2"
ARGUMENTS = [*MODEL.split(), *DATA.split(), *TRAIN.split(), *ACCUMULATE.split(), *SAVE.split()]


def start_run(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A run in a separate process that has created its folder."""
    command = [sys.executable, "-m", "phasor", "train", *ARGUMENTS, "--out", folder.name, *arguments]
    (folder / ".lock").unlink(missing_ok=True)
    log = folder.with_suffix(".log").open("ab")
    with log:
        process = subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=log)
    while process.poll() is None and not (folder / ".lock").exists():
        time.sleep(0.002)
    return process


def finish_run(folder: Path, *arguments: str) -> float:
    """The same until it is finished; the seconds it took from its folder on."""
    process = start_run(folder, *arguments)
    began = time.monotonic()
    assert process.wait(300) == 0, folder.with_suffix(".log").read_text()
    return time.monotonic() - began


def run_contents(folder: Path) -> dict[str, Any]:
    """What has to be the same in a run that was never killed."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = [*folder.glob("model/*"), *folder.glob("checkpoints/*/*.safetensors"), *folder.glob("data/*.tokens")]
    return {
        "metrics": [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in read],
        "files": {str(file.relative_to(folder)): file.read_bytes() for file in (*files, folder / "samples.txt")},
        "names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "events" not in path.parts),
    }


def check_kills(place: Path, epochs: int, kills: int, seed: int) -> None:
    (place / "notes.txt").write_text(TEXT)
    length = ["--train.epochs", str(epochs)]
    seconds = finish_run(place / "whole", *length)
    draw, killed = random.Random(seed), 0
    while killed < kills:
        process = start_run(place / "run", *length, *(["--resume"] if (place / "run").exists() else []))
        time.sleep(draw.uniform(0, seconds / draw.choice((1, 4))))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
    finish_run(place / "run", *length, "--resume")
    assert run_contents(place / "run") == run_contents(place / "whole")


@pytest.mark.slow  # tests of kill points and of runs that are killed prove it of the functions behind the command
def test_a_command_that_is_killed_resumes_as_if_it_had_not_been(tmp_path: Path) -> None:
    check_kills(tmp_path, epochs=2, kills=1, seed=0)


@pytest.mark.slow
def test_a_command_killed_a_dozen_times_resumes_as_if_it_had_not_been(tmp_path: Path) -> None:
    check_kills(tmp_path, epochs=5, kills=12, seed=1)
