"""Time and power of calls that keep a GPU busy, once it is as warm and as slow as training makes it."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from phasor.bench.timing import Timer

REPEATS, SECONDS = 3, 1.5


class PowerMeter:
    """Median watts and megahertz of the card while in it; nothing without a GPU or `nvidia-smi`."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu and shutil.which("nvidia-smi") is not None
        self.found: dict[str, float] = {}

    def __enter__(self) -> PowerMeter:
        if self.on_gpu:
            card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            command = ["nvidia-smi", "-i", card, "--query-gpu=power.draw.instant,clocks.sm,power.limit"]
            command += ["--format=csv,noheader,nounits", "-lms", "100"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.on_gpu:
            return
        self.process.terminate()
        said = (re.findall(r"\d+\.?\d*", line) for line in self.process.communicate()[0].splitlines())
        rows = [[float(x) for x in line] for line in said if len(line) == 3]  # a card may not know one of them
        if rows:
            watts, clock, limit = (statistics.median(column) for column in zip(*rows, strict=True))
            self.found = {"watts": watts, "mhz": clock, "limit_watts": limit}


def sustained_ms(timer: Timer, call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call, one after the other, the median of rows of SECONDS; and what the card did meanwhile."""
    if not timer.on_gpu:
        return {"ms": 1e3 * timer.wall(call, warmups=1)}

    def row(count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / count

    row(1)
    count = max(2, round(1000 * SECONDS / row(2)))
    row(count)
    with PowerMeter(timer.on_gpu) as meter:
        ms = statistics.median(row(count) for _ in range(REPEATS))
    return {"ms": round(ms, 2)} | meter.found
