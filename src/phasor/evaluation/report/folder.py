"""The folder of a report: its files land whole, each under its name, and its manifest lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from phasor.artifacts import ArtifactFolder
from phasor.evaluation.report.charts import check_charts
from phasor.manifest import Kind


def check_out(out: str | Path | None, names: Iterable[str] = (), kind: Kind = "report") -> Path | None:
    """The folder a report goes to, or None; ValueError where it cannot. Called before the long work.

    A report's folder is new, empty, or one with reports; `names` are the files to write, which replace no others.
    """
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file, and a {kind} is a folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {folder.absolute().parent} to write {folder.name} to (--out)")
    check_charts()
    artifact = ArtifactFolder(folder, kind)
    if kind == "report":  # a comparison has a file that says so
        artifact.check_kind()
    artifact.check_names(names)
    return folder


def write_report(folder: Path, files: Mapping[str, str | bytes], kind: Kind = "report") -> None:
    """Write files into a folder, which is created if need be; only files of earlier reports are replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_report(Path(place, "report"), {"results.json": "{}"})
    ...     sorted(path.name for path in Path(place, "report").iterdir())
    ['phasor_manifest.json', 'results.json']
    """
    encoded = {name: text.encode("utf-8") if isinstance(text, str) else text for name, text in files.items()}
    ArtifactFolder(folder, kind).update(encoded)
