"""Timers, and the machine's limits: the bandwidth of a copy and the rate of a matmul."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable

import torch

FLUSH_BYTES = 1 << 28  # bytes written between calls on a GPU: its caches are cold then
ATTEMPTS = 5  # at a difference of two times that other work on the machine can make negative
LEAD_CYCLES = 4_000_000  # the GPU's ticks between calls, some milliseconds, in which the host gets ahead
ROW_LEAD_CYCLES = 300_000_000  # about 0.15 s, in which the host prepares AHEAD_CALLS training steps
AHEAD_CALLS = 3


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
        """Wall time of each call, the device synchronized before the clock is read."""
        times: list[float] = []
        while len(times) < self.repeats and (len(times) < 3 or sum(times) < self.seconds):
            begun = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begun)
        return times

    def wall(self, call: Callable[[], object], warmups: int = 3) -> float:
        """Median wall time of a call that the host is part of."""
        for _ in range(warmups):
            call()
        self.wait()
        return statistics.median(self.on_host(call))

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

    def graph_ms(self, call: Callable[[], object], repeats: int = 30, calls: int = 1, cold: bool = True) -> float:
        """Median milliseconds of a call in a CUDA graph of `calls` of them, so that the host's speed does not matter.

        Without a GPU it is the wall time of one call.
        """
        if not self.on_gpu:
            return 1e3 * call_seconds(call)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        flush = torch.empty(FLUSH_BYTES if cold else 1, dtype=torch.int8, device=self.device)
        events = []
        for _ in range(repeats + 3):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events[3:]) / calls

    def back_to_back_ms(self, call: Callable[[], object], seconds: float = 0.25) -> float:
        """Median milliseconds of GPU calls one after the other: as many as fit into `seconds`, 3 to 50.

        Without a GPU it is the wall time of one call.
        """
        if not self.on_gpu:
            return 1e3 * call_seconds(call)
        count = calls_within(seconds, call)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    def host_us(self, call: Callable[[], object], calls: int = 200) -> float:
        """Microseconds that the host needs to launch a call; the device is not waited for."""
        for _ in range(min(20, calls)):
            call()
        self.wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        took = time.perf_counter() - begun
        self.wait()
        return 1e6 * took / calls

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """GiB of GPU memory that a call allocates at most, beyond what was allocated before."""
        if not self.on_gpu:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def call_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call on the host."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def difference(
    measure: Callable[[Callable[[], object]], float], longer: Callable[[], object], shorter: Callable[[], object]
) -> float:
    """Seconds that one call takes longer than another that is a part of it; measured again where other work hid it.

    >>> clock = iter([2.0, 5.0, 7.0, 3.0])
    >>> difference(lambda call: next(clock), longer=list, shorter=list)
    4.0
    """
    seconds = measure(longer) - measure(shorter)
    for _ in range(ATTEMPTS - 1):
        if seconds > 0:
            break
        seconds = measure(longer) - measure(shorter)
    return seconds


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that a GPU spends in the kernels and copies of a call, the gaps between them not counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return 1e-6 * union_length([(event.time_range.start, event.time_range.end) for event in events])


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what spans cover together. Kernels overlap where one may start before the previous one has ended.

    >>> union_length([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def row_seconds(call: Callable[[], object], calls: int, host_ahead: bool = False) -> float:
    """Median seconds of a GPU call among `calls` in a row, as in training: from the end of another one before them on.

    With `host_ahead` the device begins when the host had time to prepare some calls. Each row follows a rest of the
    device, which slows down under a load that lasts.
    """
    seconds = []
    for _ in range(3):
        torch.cuda._sleep(ROW_LEAD_CYCLES)
        if not host_ahead:
            torch.cuda.synchronize()
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(1e-3 * start.elapsed_time(end) / calls)
    return statistics.median(seconds)


def row_seconds_on_device(call: Callable[[], object], calls: int) -> float:
    """Seconds of a GPU call in such a row if the device never waits for the host.

    Where the host takes longer than the device, it does not stay ahead for more than `AHEAD_CALLS`. A row of so few is
    faster by some percent, because the device has not lowered its clock yet.
    """
    few = row_seconds(call, AHEAD_CALLS, host_ahead=True)
    return few if few < host_seconds(call) else row_seconds(call, calls, host_ahead=True)


def host_seconds(call: Callable[[], object]) -> float:
    """Seconds that the host needs to launch a GPU call, one at a time: many would fill the queue and wait for it."""
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return min(seconds)


def bandwidth(timer: Timer, size: int) -> float:
    """Bytes per second, read and written, of a plain copy of that many bytes."""
    source = torch.zeros(size, dtype=torch.int8, device=timer.device)
    copy = torch.empty_like(source)
    return 2 * size / timer(lambda: copy.copy_(source))


def arithmetic(timer: Timer, side: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matmul of square matrices."""
    a, b = torch.randn(2, side, side, device=timer.device).to(dtype)
    return 2 * side**3 / timer(lambda: a @ b)


def calls_within(seconds: float, call: Callable[[], object], warmups: int = 1) -> int:
    """How many consecutive GPU calls fit into some seconds, 3 to 50, estimated from one call."""
    for _ in range(warmups):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return max(3, min(50, int(seconds / (time.perf_counter() - begun))))


def alternate(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of each call in `runs` alternating rounds, so that other load on the machine falls on all of them.

    >>> times = alternate({"a": lambda: None, "b": lambda: None}, runs=2)
    >>> {name: len(values) for name, values in times.items()}
    {'a': 2, 'b': 2}
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            times[name].append(call_seconds(call))
    return times
