"""Streams in separate processes, killed at the n-th operation on the files of their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from kill_points import KillAt

from phasor.evaluation import evaluate_stream


def stream_and_die(model: str, file: str, out: str, resume: bool, point: int | None, report: str) -> None:
    """A stream as the whole of a process; it is killed at a point, or else reports its result and the points."""
    torch.set_num_threads(1)
    kill = KillAt(out, point)
    result = evaluate_stream(model, file, chunk=16, out=out, resume=resume, save_seconds=0, device="cpu")
    Path(report).write_text(json.dumps({"points": kill.count, "result": result}))
    os._exit(0)
