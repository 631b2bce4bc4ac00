"""The folder of a comparison: what it was begun with, and what is measured already, scheme by scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phasor.artifacts import ArtifactFolder
from phasor.config.schema import quote
from phasor.config.text_files import from_json, read_text
from phasor.evaluation.compare.settings import CompareSettings
from phasor.evaluation.report import check_out

MARKER, RUNS, MEASURED = "comparison.json", "runs", "measured"
VERSION = 1


class ComparisonFolder:
    """The folder `out`: `runs` holds a run per scheme and seed, `measured` what came of each.

    A run that is measured is not trained again, so a comparison that was killed goes on where it stood.
    """

    def __init__(self, out: str | Path) -> None:
        checked = check_out(out)
        assert checked is not None
        self.path = checked

    def begin(self, settings: CompareSettings, fingerprint: str) -> None:
        """Write down what is compared, or refuse to go on with anything else."""
        marker = self.path / MARKER
        now: dict[str, Any] = {"version": VERSION, "settings": settings.fixed_values(), "data": fingerprint}
        if not marker.exists():
            if self.path.is_dir() and any(entry.name not in (RUNS, "data") for entry in self.path.iterdir()):
                raise ValueError(f"{self.path} exists and holds no comparison: name a new folder (--out)")
            self.path.mkdir(exist_ok=True)
            ArtifactFolder(self.path).write_text(MARKER, json.dumps(now))
            return
        before = from_json(read_text(marker, "the comparison"), marker)
        if not isinstance(before, dict) or before.get("version") != VERSION or not isinstance(before["settings"], dict):
            raise ValueError(f"{marker} is not the file of a comparison that this version can go on with")
        for name, value in now["settings"].items():
            earlier = before["settings"].get(name)
            if earlier != value:
                raise ValueError(
                    f"{self.path} was begun with {name} {quote(earlier)}, and this is {quote(value)}: give the same "
                    "options to go on, or another --out"
                )
        if before["data"] != fingerprint:
            raise ValueError(
                f"the data of the comparison in {self.path} have changed since it was begun, so that it cannot go on: "
                "give another --out"
            )

    def run(self, scheme: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / RUNS / f"{scheme.replace(':', '-').replace('+', '-')}-{seed}"

    def read_measurement(self, scheme: str, seed: int) -> dict[str, Any] | None:
        """What was measured of a run, if it was."""
        file = self.path / MEASURED / f"{self.run(scheme, seed).name}.json"
        if not file.exists():
            return None
        found = from_json(read_text(file, "the measurement"), file)
        if not isinstance(found, dict):
            raise ValueError(f"{file} does not hold a measurement: delete it to measure again")
        return found

    def keep(self, scheme: str, seed: int, result: dict[str, Any]) -> None:
        """Keep what was measured of a run."""
        measured = ArtifactFolder(self.path / MEASURED)
        measured.path.mkdir(exist_ok=True)
        measured.write_text(f"{self.run(scheme, seed).name}.json", json.dumps(result))
