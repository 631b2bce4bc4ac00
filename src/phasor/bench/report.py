"""What came of measuring: records of plain numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from phasor.config.schema import names

Unit = Literal["ms", "tokens/s"]


@dataclass(frozen=True)
class Entry:
    """One contender: its time or rate, or why it has none.

    `error` is that of its result against the reference, relative; `memory` the most a GPU held, in GiB.
    """

    who: str
    value: float | None
    error: float | None = None
    memory: float | None = None
    note: str = ""

    @property
    def ours(self) -> bool:
        return self.who.startswith("phasor")


@dataclass(frozen=True)
class Row:
    """One work: what it is, who did it how fast, and what the machine would allow."""

    work: str
    title: str
    unit: Unit
    limit: float
    limit_is: str
    entries: tuple[Entry, ...]

    def speed(self, value: float) -> float:
        """More is faster."""
        return 1 / value if self.unit == "ms" else value

    @property
    def best(self) -> float | None:
        """The fastest of ours."""
        ours = [entry.value for entry in self.entries if entry.ours and entry.value is not None]
        return max(ours, key=self.speed, default=None)

    def share(self, entry: Entry) -> float | None:
        """How much of the limit an entry reaches."""
        return None if entry.value is None else self.speed(entry.value) / self.speed(self.limit)

    def against(self, entry: Entry) -> float | None:
        """How many times as fast as an entry the fastest of ours is.

        >>> row = Row("rotary", "", "ms", 1.0, "", (Entry("phasor", 2.0), Entry("torch", 3.0)))
        >>> [row.against(entry) for entry in row.entries], row.share(row.entries[0])
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
    bandwidth: float  # bytes a second, read and written, of a plain copy
    arithmetic: float  # operations a second of a plain matrix product
    rows: tuple[Row, ...]

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Report:
        """The report that `to_dict` told."""
        try:
            rows = []
            for row in told["rows"]:
                entries = (Entry(**{name: entry[name] for name in names(Entry)}) for entry in row["entries"])
                rows.append(Row(**{**row, "entries": tuple(entries)}))
            return cls(**{**told, "rows": tuple(rows)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not what phasor bench --json writes: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON, with the ratios worked out."""
        told = asdict(self)
        for plain, row in zip(told["rows"], self.rows, strict=True):
            for dictionary, entry in zip(plain["entries"], row.entries, strict=True):
                dictionary |= {"of_limit": row.share(entry), "phasor_against_it": row.against(entry)}
        return told


def in_unit(unit: Unit, seconds: float, tokens: float) -> float:
    """
    >>> in_unit("ms", 0.5, 0), in_unit("tokens/s", 0.5, 100)
    (500.0, 200.0)
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise RuntimeError("the machine is too busy to time this")
    return 1e3 * seconds if unit == "ms" else tokens / seconds
