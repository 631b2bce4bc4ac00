"""The folders of the command line, by number: models, runs and reports that requests may read, and nothing else.

A request names a folder by its number, never by a path. Folders are those that were given and those inside of them
that are models, runs or reports, two levels down. Links that lead out of a given folder are refused.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from phasor.config.text_files import path_of
from phasor.lab.endpoints import FieldError

CONFIG, MARKER, LENGTHS = "config.json", "run.json", "lengths.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "snapshots")
PARTS = ("checkpoints", "data", "events", "model", "tokenizer")  # of a run, which are not listed as folders
LEVELS = 2  # below a folder of the command line
MOST = 500  # folders that are found inside of one that was given, and entries of a folder that are looked at


@dataclass(frozen=True)
class Folder:
    """A folder that requests may read from: its number, its name on the page, and where it is.

    `root` is the folder of the command line that it is in, with links resolved.
    """

    number: int
    name: str
    path: Path
    root: Path

    def to_plain(self) -> tuple[int, str, str, str]:
        """What another process makes the same folder from, by `from_plain`."""
        return self.number, self.name, str(self.path), str(self.root)

    @classmethod
    def from_plain(cls, fields: Sequence[Any]) -> Self:
        number, name, path, root = fields
        return cls(number, name, Path(path), Path(root))

    def file(self, *names: str) -> Path:
        """The place of a file below the folder; ValueError where that is a link out of the folder that was given."""
        target = self.path.joinpath(*names)
        resolved = target.resolve()
        if not resolved.is_relative_to(self.root) and not is_cached(self.root, resolved):
            raise ValueError(f"{self.name}/{'/'.join(names)} is a link out of the folder, and is not read")
        return target

    def has(self, *names: str) -> bool:
        """Whether there is such a file, whose link, if it is one, stays inside."""
        try:
            return self.file(*names).exists()
        except (ValueError, OSError):
            return False

    def error_text(self, error: Exception) -> str:
        """The sentence of an error about the folder, with its name on the page in place of its path."""
        return str(error).replace(str(self.path), self.name)

    def check_links(self, below: Path) -> None:
        """Refuse a part of the folder in which anything is a link out of it."""
        relative = below.relative_to(self.path).parts
        self.file(*relative)
        for place, folders, files in os.walk(below):
            for name in (*folders, *files):
                self.file(*Path(place, name).relative_to(self.path).parts)

    @property
    def is_run(self) -> bool:
        """Whether `train` writes to it."""
        return self.has(MARKER) and stat.S_ISREG(os.lstat(self.path / MARKER).st_mode)

    @property
    def is_model(self) -> bool:
        """Whether there are weights to load: a model's, or those of a run."""
        if self.is_run:
            return any(self.has(name) for name in ("model", "checkpoints"))
        return any(self.has(name) for name in WEIGHTS) and (self.has(CONFIG) or self.has("snapshots"))

    @property
    def is_report(self) -> bool:
        """Whether `evaluate --lengths` wrote a report there."""
        return self.has(LENGTHS)


class FolderList:
    """Folders by their numbers."""

    def __init__(self, folders: Sequence[Folder] = ()) -> None:
        self.folders = folders

    def list(self) -> list[Folder]:
        """All folders, by their numbers."""
        return list(self.folders)

    def get(self, number: int, field: str = "folder") -> Folder:
        """The folder of a number; `field` names the field of the request that holds it."""
        folders = self.list()
        if not 0 <= number < len(folders):
            there = f"0 to {len(folders) - 1}" if folders else "none: give one, as in phasor lab FOLDER"
            raise FieldError(field, f"there is no folder {number}; there are {there}")
        return folders[number]


class Folders(FolderList):
    """The folders that were given, first and in their order; then those found inside of them, as they appear.

    A number stays that of its folder for as long as the page is served.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     run = Path(place, "run-1")
    ...     run.mkdir()
    ...     _ = Path(run, "run.json").write_text("{}")
    ...     [(folder.number, folder.is_run) for folder in Folders([place]).list()]
    [(0, False), (1, True)]
    """

    def __init__(self, given: Sequence[str | Path] = ()) -> None:
        self.lock = threading.Lock()
        self.known: dict[Path, Folder] = {}
        self.names: list[str] = []  # what the page calls the folders that were given
        for path in map(path_of, given):
            if not path.is_dir():
                what = "is a file, and not a folder" if path.exists() else "does not exist"
                raise ValueError(f"{path} {what}")
            root = path.resolve()
            if root not in self.known:
                self.names.append(name_of(root))
                self.add(self.names[-1], root, root)

    def add(self, name: str, path: Path, root: Path) -> None:
        if path not in self.known:
            self.known[path] = Folder(len(self.known), name, path, root)

    def list(self) -> list[Folder]:
        """All folders by their numbers, with those that have appeared since the last call."""
        with self.lock:
            for folder in list(self.known.values()):
                if folder.path == folder.root:
                    for path in islice(inner_folders(folder, LEVELS), MOST):
                        name = f"{folder.name}/{path.relative_to(folder.root).as_posix()}"
                        self.add(name, path, folder.root)
            return list(self.known.values())


def name_of(root: Path) -> str:
    """What the page calls a folder that was given; a snapshot in the hub's cache by the name of its repository.

    >>> name_of(Path("/runs/lm-1")), name_of(Path("/hub/models--someone--tiny/snapshots/c0ffee"))
    ('lm-1', 'someone/tiny')
    """
    if root.parent.name == "snapshots":
        return root.parent.parent.name.removeprefix("models--").replace("--", "/")
    return root.name or str(root)


def inner_folders(folder: Folder, levels: int) -> Iterator[Path]:
    """The models, runs and reports below a folder, a run before what is in it; links to folders are not followed."""
    try:
        entries = sorted(os.scandir(folder.path), key=lambda entry: entry.name)[:MOST]
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        inner = Folder(-1, entry.name, Path(entry.path), folder.root)
        if folder.is_run and entry.name in PARTS:
            continue
        if inner.is_run or inner.is_model or inner.is_report:
            yield inner.path
        if levels > 1 and not (inner.is_model and not inner.is_run):
            yield from inner_folders(inner, levels - 1)


def is_cached(root: Path, target: Path) -> bool:
    """Whether a file is that of a snapshot in the hub's cache, whose files are links to the blobs beside it."""
    return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
