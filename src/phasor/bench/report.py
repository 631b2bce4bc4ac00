"""The results of a benchmark, as plain records."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from phasor.config.schema import names

Unit = Literal["ms", "tokens/s"]


@dataclass(frozen=True)
class Entry:
    """The result of one implementation: its time or throughput, or why it has none.

    `error` is that of its result against the reference, relative; `memory` the most a GPU held, in GiB; `device` the
    milliseconds that a GPU was at work, where the value is the wall time; `compile` the seconds of a cold compilation.
    """

    name: str
    value: float | None
    error: float | None = None
    memory: float | None = None
    note: str = ""
    device: float | None = None
    compile: float | None = None

    @property
    def idle(self) -> float | None:
        """The share of the wall time in which the device had nothing to do.

        >>> Entry("phasor", 20.0, device=15.0).idle
        0.25
        """
        if self.value is None or self.device is None:
            return None
        return max(0.0, 1 - self.device / self.value)

    @property
    def ours(self) -> bool:
        return self.name.startswith("phasor")


@dataclass(frozen=True)
class WorkloadResult:
    """One workload: what it is, the result of each implementation, and the machine's limit."""

    workload: str
    title: str
    unit: Unit
    limit: float
    limit_basis: str
    entries: tuple[Entry, ...]
    family: str = ""  # and what was timed of it, for the table of families
    part: str = ""

    def speed(self, value: float) -> float:
        """More is faster."""
        return 1 / value if self.unit == "ms" else value

    @property
    def best(self) -> float | None:
        """The fastest of ours."""
        ours = [entry.value for entry in self.entries if entry.ours and entry.value is not None]
        return max(ours, key=self.speed, default=None)

    def fraction_of_limit(self, entry: Entry) -> float | None:
        """How much of the limit an entry reaches."""
        return None if entry.value is None else self.speed(entry.value) / self.speed(self.limit)

    def speedup_over(self, entry: Entry) -> float | None:
        """How many times as fast as an entry the fastest of ours is.

        >>> row = WorkloadResult("rotary", "", "ms", 1.0, "", (Entry("phasor", 2.0), Entry("torch", 3.0)))
        >>> [row.speedup_over(entry) for entry in row.entries], row.fraction_of_limit(row.entries[0])
        ([1.0, 1.5], 0.5)
        """
        if entry.value is None or self.best is None:
            return None
        return self.speed(self.best) / self.speed(entry.value)


@dataclass(frozen=True)
class Report:
    """All rows, and on what they were measured."""

    device: str
    dtype: str
    versions: dict[str, str]
    bandwidth: float  # bytes per second, read and written, of a plain copy
    arithmetic: float  # floating-point operations per second of a large matmul
    rows: tuple[WorkloadResult, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that `to_dict` gave."""
        try:
            rows = []
            for row in data["rows"]:
                entries = (
                    Entry(**{name: entry[name] for name in names(Entry) if name in entry}) for entry in row["entries"]
                )
                rows.append(WorkloadResult(**{**row, "entries": tuple(entries)}))
            return cls(**{**data, "rows": tuple(rows)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not what phasor bench --json writes: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON, with the ratios worked out."""
        data = asdict(self)
        for plain, row in zip(data["rows"], self.rows, strict=True):
            for dictionary, entry in zip(plain["entries"], row.entries, strict=True):
                dictionary |= {
                    "fraction_of_limit": row.fraction_of_limit(entry),
                    "phasor_speedup": row.speedup_over(entry),
                    "idle": entry.idle,
                }
        return data


def in_unit(unit: Unit, seconds: float, tokens: float) -> float:
    """
    >>> in_unit("ms", 0.5, 0), in_unit("tokens/s", 0.5, 100)
    (500.0, 200.0)
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise RuntimeError("the machine is too busy to time this")
    return 1e3 * seconds if unit == "ms" else tokens / seconds
