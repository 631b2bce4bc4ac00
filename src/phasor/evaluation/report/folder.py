"""The folder of a report: its files land whole, each under its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phasor.artifacts import ArtifactFolder
from phasor.evaluation.report.charts import check_charts


def check_out(out: str | Path | None) -> Path | None:
    """The folder a report goes to, or None; ValueError where it cannot. Called before the long work."""
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file, and a report is a folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {folder.absolute().parent} to write {folder.name} to (--out)")
    check_charts()
    return folder


def write_report(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, which is created if need be; what else is there stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_report(Path(place, "report"), {"results.json": "{}"})
    ...     [path.name for path in Path(place, "report").iterdir()]
    ['results.json']
    """
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        with ArtifactFolder(folder).write(name) as staged:
            staged.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
