"""Metrics for Prometheus: what the engine does, and how long requests wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from phasor.generation.engine import Engine

GAUGES = {
    "running": "rows that the engine works on",
    "waiting": "requests that wait for a row",
    "pages": "pages of keys and values",
    "pages_held": "pages of keys and values that rows hold",
}
COUNTERS = {
    "prompt_tokens": "tokens of prompts that were read",
    "cached_tokens": "tokens of prompts that other requests had read",
    "new_tokens": "tokens that were generated",
    "steps": "steps of the engine",
    "set_back": "rows that were set back to be computed again",
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counts and times of one server."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "phasor_requests", "requests by route and status", ["route", "status"], registry=self.registry
        )
        self.first_token, self.between_tokens, self.duration = (
            Histogram(f"phasor_{name}_seconds", text, registry=self.registry, buckets=SECONDS)
            for name, text in (
                ("time_to_first_token", "from a request to its first token"),
                ("time_between_tokens", "from one token of a choice to the next"),
                ("request_duration", "from a request to the end of its answer"),
            )
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """What the engine counts, when it is asked for."""
        if self.engine is None:
            return
        stats = self.engine.stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"phasor_{name}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"phasor_{name}", text, value=getattr(stats, name))

    def text(self) -> bytes:
        """All of it in the form that Prometheus reads."""
        return generate_latest(self.registry)

    def clock(self) -> RequestClock:
        """A clock for one request."""
        return RequestClock(self)


class RequestClock:
    """Notes when the tokens of one request come."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.began = metrics, time.monotonic()
        self.last: dict[int, float] = {}  # when the last token of each choice came

    def note(self, choice: int) -> None:
        """A token of a choice has come."""
        now = time.monotonic()
        if not self.last:
            self.metrics.first_token.observe(now - self.began)
        elif choice in self.last:
            self.metrics.between_tokens.observe(now - self.last[choice])
        self.last[choice] = now

    def end(self) -> None:
        """The answer is complete."""
        self.metrics.duration.observe(time.monotonic() - self.began)
