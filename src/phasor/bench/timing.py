"""Median times, and what the machine can do at best: copying and multiplying."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 1 << 28  # bytes written between calls on a GPU: its caches are cold then
LEAD_CYCLES = 4_000_000  # the GPU's ticks between calls, some milliseconds, in which the host gets ahead


class Timer:
    """Median seconds of a call, on the device's own clock where it has one."""

    def __init__(self, device: torch.device, repeats: int, seconds: float) -> None:
        self.device, self.repeats, self.seconds = device, repeats, seconds
        self.on_gpu = device.type == "cuda"

    def __call__(self, call: Callable[[], object], warmups: int | None = None) -> float:
        for _ in range(warmups or (3 if self.on_gpu else 1)):
            call()
        self.wait()
        return statistics.median(self.on_device(call) if self.on_gpu else self.on_host(call))

    def on_host(self, call: Callable[[], object]) -> list[float]:
        """Wall time of each call; the last of its work done before the clock is read."""
        times: list[float] = []
        while len(times) < self.repeats and (len(times) < 3 or sum(times) < self.seconds):
            begun = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begun)
        return times

    def on_device(self, call: Callable[[], object]) -> list[float]:
        begun, spans = time.perf_counter(), []
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        for _ in range(self.repeats):
            flush.zero_()
            torch.cuda._sleep(LEAD_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            spans.append((start, end))
            if time.perf_counter() - begun > self.seconds and len(spans) >= 3:
                break
        self.wait()
        return [1e-3 * start.elapsed_time(end) for start, end in spans]

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def bandwidth(timer: Timer, size: int) -> float:
    """Bytes per second, read and written, of a plain copy of so many bytes."""
    source = torch.zeros(size, dtype=torch.int8, device=timer.device)
    copy = torch.empty_like(source)
    return 2 * size / timer(lambda: copy.copy_(source))


def arithmetic(timer: Timer, side: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matmul of square matrices."""
    a, b = torch.randn(2, side, side, device=timer.device).to(dtype)
    return 2 * side**3 / timer(lambda: a @ b)
