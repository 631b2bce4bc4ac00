"""Manifests: the kind of an artifact that phasor wrote, and the size, CRC-32 and SHA-256 of each of its files.

Model folders, prepared data and checkpoints have one, and run folders. Opening an artifact compares its files with it,
so that a damaged one is an error and not a wrong result: model folders and data by their CRC-32, which is several times
as fast, checkpoints by both. A folder without a manifest was not written by phasor.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phasor.config.text_files import path_of
from phasor.files import atomic_write

MANIFEST = "phasor_manifest.json"
FORMAT = 1
Kind = Literal["run", "model", "data", "checkpoint"]
KINDS: tuple[Kind, ...] = ("run", "model", "data", "checkpoint")
RUN_MARKER = "run.json"  # in run folders
ENTRY = ("bytes", "crc32", "sha256")  # the fields of a file
THREADS = 8
LARGEST = 64 << 20  # bytes of a manifest; one of a file per tensor has less
BLOCK = 1 << 20  # bytes that are read at a time


class DamagedError(ValueError):
    """An artifact that phasor wrote is not as it was written; the message says how, and what to do about it."""


class Fingerprint(NamedTuple):
    """The size of a file in bytes, its CRC-32, and its SHA-256 unless that was not asked for."""

    size: int
    crc32: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says: the kind of the artifact, and the fingerprints of its files."""

    kind: Kind
    files: dict[str, Fingerprint]


def write_manifest(folder: Path, kind: Kind, names: Iterable[str] | None = None) -> Manifest:
    """Write the manifest of the files in a folder, of all of them or of those that are named.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text("{}")
    ...     _ = write_manifest(Path(folder), "model")
    ...     _ = Path(folder, "config.json").write_text("{ ")
    ...     list(find_damage(Path(folder)))
    [('config.json', 'is not what was written, by its SHA-256')]
    """
    names = sorted(files_below(folder) if names is None else names)
    files = {name: found for name, found in zip(names, fingerprints(folder, names), strict=True) if found is not None}
    listed = {name: {"bytes": size, "crc32": crc32, "sha256": sha256} for name, (size, crc32, sha256) in files.items()}
    with atomic_write(folder / MANIFEST) as file:
        text = json.dumps({"format": FORMAT, "kind": kind, "files": listed}, indent=2, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    return Manifest(kind, files)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where it has none. An unreadable one is an OSError, a malformed one damage."""
    file = folder / MANIFEST
    if file.exists() and not file.is_file():
        raise DamagedError(f"{file} is damaged: it is not a regular file")
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = json.loads(content.decode("utf-8"))
        if data["format"] != FORMAT:
            raise DamagedError(
                f"{file} is damaged, or of a later version of phasor: its format is {str(data['format'])[:20]}, "
                f"not {FORMAT}"
            )
        kind, listed = data["kind"], data["files"]
        files = {name: Fingerprint(*(entry[key] for key in ENTRY)) for name, entry in listed.items()}
    except DamagedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{file} is damaged: it is not a manifest") from None
    if kind not in KINDS or not all(is_entry(name, *entry) for name, entry in files.items()):
        raise DamagedError(f"{file} is damaged: it does not list the files of a {' or '.join(KINDS)}")
    return Manifest(kind, files)


def is_entry(name: str, size: Any, crc32: Any, sha256: Any) -> bool:
    """Whether an entry is the name of a file inside the folder, a size, and digests."""
    inside = (
        not os.path.isabs(name) and "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))
    )
    numbers = type(size) is int and size >= 0 and type(crc32) is int
    return inside and numbers and isinstance(sha256, str) and len(sha256) == 64


def find_damage(
    folder: Path, names: Iterable[str] | None = None, *, thorough: bool = True
) -> Iterator[tuple[str, str]]:
    """The files of an artifact that are not as they were written, each with what is wrong with it.

    Of all files in the manifest, or of those among `names`. A file that cannot be read is an OSError, not damage. Not
    being `thorough` leaves out SHA-256, which takes several times as long as CRC-32.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        yield MANIFEST, "is missing"
        return
    wanted = set(manifest.files if names is None else names)
    chosen = {name: entry for name, entry in manifest.files.items() if name in wanted}
    sizes = {name: file_size(folder / name) for name in chosen}
    same_size = [name for name, expected in chosen.items() if sizes[name] == expected.size]
    found = dict(zip(same_size, fingerprints(folder, same_size, thorough=thorough), strict=True))
    for name, expected in chosen.items():
        actual = found.get(name)
        if sizes[name] is None or (name in found and actual is None):
            yield name, "is missing"
        elif actual is None:
            yield name, f"has {sizes[name]} bytes and not {expected.size}"
        elif actual.sha256 not in (None, expected.sha256):
            yield name, "is not what was written, by its SHA-256"
        elif actual[:2] != expected[:2]:
            yield name, "is not what was written, by its CRC-32"


def verify_folder(folder: Path, kind: Kind, names: Iterable[str] | None = None) -> bool:
    """Compare an artifact with its manifest; False where it has none, a `DamagedError` where they differ."""
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return False
        if manifest.kind != kind:
            raise DamagedError(f"{folder} is not a {kind} folder: by its {MANIFEST} it is a {manifest.kind} folder")
        wrong = [f"{name} {what}" for name, what in find_damage(folder, names, thorough=False)]
    except OSError as error:
        raise type(error)(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    if wrong:
        advice = f"; if you changed it yourself: phasor verify --accept {folder}" if kind == "model" else ""
        raise DamagedError(f"{folder} is damaged: {join(wrong)}{advice}")
    return True


def join(lines: list[str], most: int = 5) -> str:
    """
    >>> join(["a is missing", "b is missing", "c is missing"], most=2)
    'a is missing; b is missing; and 1 more'
    """
    return "; ".join([*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])])


def files_below(folder: Path) -> Iterator[str]:
    """The names of all files in a folder and its subfolders, except for hidden ones and the manifest itself."""
    for place, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".")]
        for name in names:
            relative = Path(place, name).relative_to(folder).as_posix()
            if relative != MANIFEST and not name.startswith("."):
                yield relative


def file_size(file: Path) -> int | None:
    """The size of a file; None where there is none."""
    try:
        return file.stat().st_size if file.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def fingerprints(folder: Path, names: Iterable[str], *, thorough: bool = True) -> list[Fingerprint | None]:
    """The fingerprints of files, several at a time; None for a file that is not there."""
    files = [folder / name for name in names]
    if len(files) < 2:
        return [fingerprint(file, thorough) for file in files]
    with ThreadPoolExecutor(min(THREADS, len(files), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file: fingerprint(file, thorough), files))


def fingerprint(file: Path, thorough: bool = True) -> Fingerprint | None:
    """The fingerprint of one file, with its SHA-256 if it is to be thorough."""
    if not file.is_file():
        return None
    size, crc32, sha256 = 0, 0, hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
            if thorough:
                sha256.update(block)
    return Fingerprint(size, crc32, sha256.hexdigest() if thorough else None)


@dataclass(frozen=True)
class ArtifactReport:
    """An artifact, the number of its files, and those that are not as they were written with what is wrong."""

    folder: Path
    kind: Kind
    files: int
    wrong: list[tuple[str, str]]


def verify(folder: str | Path) -> list[ArtifactReport]:
    """Compare a folder that phasor wrote with its manifest; of a run its data, checkpoints and model too.

    Each report names the files that are missing, or are not as they were written.

    >>> import tempfile
    >>> from phasor import Transformer, preset, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)), folder)
    ...     _ = Path(folder, "config.json").write_text("{}")
    ...     [(report.kind, report.files, [name for name, what in report.wrong]) for report in verify(folder)]
    [('model', 3, ['config.json'])]
    """
    folder = path_of(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    own: list[tuple[Path, Kind | None]] = [(folder, None)] if exists(folder / MANIFEST) else []
    reports = [report_of(place, kind) for place, kind in (*own, *run_parts(folder))]
    if not reports:
        raise ValueError(f"{folder} was not written by phasor: it has no {MANIFEST}")
    return reports


def run_parts(folder: Path) -> Iterator[tuple[Path, Kind]]:
    """The artifacts inside a run folder, where there are any; the folder of its checkpoints if it cannot be read."""
    checkpoints = folder / "checkpoints"
    try:
        steps = sorted(checkpoints / name for name in os.listdir(checkpoints) if name.startswith("step-"))
    except (FileNotFoundError, NotADirectoryError):
        steps = []
    except OSError:
        steps = [checkpoints]
    parts: list[tuple[Path, Kind]] = [(folder / "data", "data"), (folder / "tokenizer", "model")]
    parts += [*((step, "checkpoint") for step in steps), (folder / "model", "model")]
    is_run = exists(folder / RUN_MARKER)
    for place, kind in parts:
        if exists(place) and (is_run or exists(place / MANIFEST)):
            yield place, kind


def exists(path: Path) -> bool:
    """Whether there is something under a name; an OSError where that cannot be told."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def report_of(folder: Path, kind: Kind | None) -> ArtifactReport:
    """The report of one artifact, of this kind if one is given."""
    try:
        manifest = read_manifest(folder)
        wrong = list(find_damage(folder))
    except DamagedError as error:
        return ArtifactReport(folder, kind or "run", 0, [(MANIFEST, str(error).removeprefix(f"{folder / MANIFEST} "))])
    except OSError as error:
        return ArtifactReport(
            folder, kind or "run", 0, [(Path(str(error.filename)).name, f"cannot be read: {error.strerror}")]
        )
    found = kind or "model" if manifest is None else manifest.kind
    if kind is not None and found != kind:
        wrong.append((MANIFEST, f"is that of a {found} folder, not of a {kind} folder"))
    return ArtifactReport(folder, found, 0 if manifest is None else len(manifest.files), wrong)


def accept(folder: str | Path) -> Manifest:
    """Write the manifest of a model folder again, so that its files are right as they are now."""
    folder = path_of(folder)
    try:
        manifest = read_manifest(folder)
        is_model = manifest is not None and manifest.kind == "model"
    except DamagedError:
        is_model = (folder / "config.json").is_file()
    if not is_model:
        raise ValueError(f"{folder} is not a model folder that phasor wrote: only such a one can be accepted as it is")
    return write_manifest(folder, "model")
