"""The folder of a comparison: what it was begun with, and what is measured already, scheme by scheme."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phasor.artifacts import ANOTHER, LOCK, ArtifactFolder
from phasor.checkpoints.runs import DATA, entries
from phasor.config.schema import quote
from phasor.evaluation.compare.settings import CompareSettings
from phasor.evaluation.report import check_out
from phasor.files import remove

MARKER, RUNS, MEASURED = "comparison.json", "runs", "measured"
VERSION = 2


class ComparisonFolder:
    """The folder `out`: `runs` holds a run per scheme and seed, `measured` what came of each.

    `comparison.json` says what is compared and which runs are the comparison's; it and the measurements hold their own
    SHA-256. A run that is measured is not trained again, so a comparison that was killed goes on where it stood.
    """

    def __init__(self, path: Path, settings: CompareSettings) -> None:
        self.path, self.artifact = path, ArtifactFolder(path, "comparison")
        self.about: dict[str, Any] = {"version": VERSION, "settings": settings.fixed_values(), "data": None}
        self.runs: list[str] = []

    @classmethod
    @contextmanager
    def open(cls, out: str | Path, settings: CompareSettings, reports: Iterable[str]) -> Iterator[ComparisonFolder]:
        """The folder, locked: a new or empty one, or that of a comparison with these settings.

        `reports` are the files of the report, which replace no others. A comparison that cannot begin leaves nothing.
        """
        path = check_out(out, reports, "comparison")
        assert path is not None
        folder = cls(path, settings)
        folder.read_marker()  # what is refused stays as it is
        created, before = not path.exists(), set(entries(path))
        path.mkdir(exist_ok=True)
        with folder.artifact.lock(f"another process compares in {path}"):
            folder.artifact.remove_leftovers(MARKER)
            if not folder.read_marker():
                folder.write_marker()
            try:
                yield folder
            except Exception:
                if not folder.runs:
                    for name in {DATA, MARKER, LOCK} - before:
                        remove(path / name)
                    with suppress(OSError):  # somebody else uses it by now
                        if created:
                            path.rmdir()
                raise

    def read_marker(self) -> bool:
        """Whether runs were begun here, with what is compared now; other settings and other folders are refused."""
        found = self.artifact.read_checksummed(MARKER)
        if found is None:
            self.artifact.check_kind()
            return False
        if found.get("version") != VERSION:
            raise ValueError(f"{self.path / MARKER} is by another version of phasor: {ANOTHER}")
        if not found["runs"]:
            return False
        for name, value in self.about["settings"].items():
            earlier = found["settings"].get(name)
            if earlier != value:
                raise ValueError(
                    f"{self.path} was begun with {name} {quote(earlier)}, and this is {quote(value)}: give the same "
                    "options to go on, or another --out"
                )
        self.about["data"], self.runs = found["data"], found["runs"]
        return True

    def write_marker(self) -> None:
        self.artifact.write_checksummed(MARKER, {**self.about, "runs": self.runs})

    def begin(self, fingerprint: str) -> None:
        """Note what the data are, or refuse to go on with others."""
        if self.about["data"] not in (None, fingerprint):
            raise ValueError(
                f"the data of the comparison in {self.path} have changed since it was begun, so that it cannot go on: "
                "give another --out"
            )
        self.about["data"] = fingerprint

    def run(self, scheme: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / RUNS / f"{scheme.replace(':', '-').replace('+', '-')}-{seed}"

    def claim_run(self, scheme: str, seed: int) -> Path:
        """The folder of a run that is trained now; refused where somebody else has put something there."""
        place = self.run(scheme, seed)
        if place.is_symlink() or (place.name not in self.runs and os.path.lexists(place)):
            raise ValueError(f"{place} was not written by this comparison, and is left alone: move it away")
        if place.name not in self.runs:
            self.runs.append(place.name)
            self.write_marker()
        return place

    def read_measurement(self, scheme: str, seed: int) -> dict[str, Any] | None:
        """What was measured of a run, if it was; refused where it is not that of this comparison."""
        name = f"{MEASURED}/{self.run(scheme, seed).name}.json"
        found = self.artifact.read_checksummed(name)
        if found is None:
            return None
        if found.get("of") != self.describe(scheme, seed):
            raise ValueError(f"{self.path / name} is of another comparison, scheme or seed: move it away")
        result: dict[str, Any] = found["result"]
        return result

    def keep(self, scheme: str, seed: int, result: dict[str, Any]) -> None:
        """Keep what was measured of a run."""
        (self.path / MEASURED).mkdir(exist_ok=True)
        name = f"{MEASURED}/{self.run(scheme, seed).name}.json"
        self.artifact.write_checksummed(name, {"of": self.describe(scheme, seed), "result": result})

    def describe(self, scheme: str, seed: int) -> dict[str, Any]:
        """What a measurement is of."""
        return {"scheme": scheme, "seed": seed, **self.about}
