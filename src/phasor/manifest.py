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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, get_args

MANIFEST = "phasor_manifest.json"
FORMAT = 1
Kind = Literal["run", "model", "data", "checkpoint", "report", "comparison"]
KINDS: tuple[Kind, ...] = get_args(Kind)
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
    """What a manifest says: the kind of the artifact, and the fingerprints of its files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text("{}")
    ...     manifest = Manifest.compute(Path(folder), "model")
    ...     _ = Path(folder, "config.json").write_text("{ ")
    ...     list(manifest.find_damage(Path(folder)))
    [('config.json', 'is not what was written, by its SHA-256')]
    """

    kind: Kind
    files: dict[str, Fingerprint]

    @classmethod
    def compute(cls, folder: Path, kind: Kind, names: Iterable[str] | None = None) -> Self:
        """The manifest of the files in a folder, of all of them or of those that are named."""
        names = sorted(files_below(folder) if names is None else names)
        found = zip(names, fingerprints(folder, names), strict=True)
        return cls(kind, {name: entry for name, entry in found if entry is not None})

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest in a folder; None where it has none. An unreadable one is an OSError, a malformed one damage."""
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
        return cls(kind, files)

    def to_json(self) -> str:
        files = {name: dict(zip(ENTRY, entry, strict=True)) for name, entry in self.files.items()}
        return json.dumps({"format": FORMAT, "kind": self.kind, "files": files}, indent=2, ensure_ascii=False) + "\n"

    def find_damage(
        self, folder: Path, names: Iterable[str] | None = None, *, thorough: bool = True
    ) -> Iterator[tuple[str, str]]:
        """The files that are not as they were written, each with what is wrong with it.

        Of all files in the manifest, or of those among `names`. A file that cannot be read is an OSError, not damage.
        Not being `thorough` leaves out SHA-256, which takes several times as long as CRC-32.
        """
        wanted = set(self.files if names is None else names)
        chosen = {name: entry for name, entry in self.files.items() if name in wanted}
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


def is_entry(name: str, size: Any, crc32: Any, sha256: Any) -> bool:
    """Whether an entry is the name of a file inside the folder, a size, and digests."""
    inside = (
        not os.path.isabs(name) and "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))
    )
    numbers = type(size) is int and size >= 0 and type(crc32) is int
    return inside and numbers and isinstance(sha256, str) and len(sha256) == 64


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
    with file.open("rb", buffering=0) as stream:
        return stream_fingerprint(stream, thorough)


def stream_fingerprint(stream: IO[bytes], thorough: bool = True) -> Fingerprint:
    """The fingerprint of what a stream has left.

    >>> import io
    >>> stream_fingerprint(io.BytesIO(b"{}"), thorough=False)
    Fingerprint(size=2, crc32=2745614147, sha256=None)
    """
    size, crc32, sha256 = 0, 0, hashlib.sha256()
    while block := stream.read(BLOCK):
        size, crc32 = size + len(block), zlib.crc32(block, crc32)
        if thorough:
            sha256.update(block)
    return Fingerprint(size, crc32, sha256.hexdigest() if thorough else None)


def digest(data: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
