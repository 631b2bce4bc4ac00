"""Folders that phasor writes: whole or not at all, with a manifest that they are compared with when they are opened.

Model folders, prepared data, checkpoints and tokenizers are written as a whole, under a hidden name beside their place,
and take that place in one step. In the folders of runs, streams, comparisons and reports files are replaced one by one.
What a killed process left under a hidden name is removed by the next one; names that phasor does not make are left
alone.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from phasor.config.schema import name_some
from phasor.config.text_files import from_json, path_of, read_text
from phasor.files import (
    OLD,
    PART,
    TOKEN,
    atomic_write,
    hidden_name,
    lock,
    lock_folder,
    name_file,
    remove,
    replace_folder,
    write_errors,
)
from phasor.manifest import MANIFEST, DamagedError, Kind, Manifest, digest, stream_fingerprint

RUN_MARKER = "run.json"  # in run folders
LOCK = ".lock"  # in folders that one process at a time writes to
ANOTHER = "name another folder (--out)"


class ArtifactFolder:
    """A folder that phasor writes, and the kind that its manifest states, where it has one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     model = ArtifactFolder(Path(place, "model"), "model")
    ...     with model.replace() as staged:
    ...         _ = (staged / "config.json").write_text("{}")
    ...     model.verify(), os.listdir(place), sorted(os.listdir(model.path))
    (True, ['model'], ['config.json', 'phasor_manifest.json'])
    """

    def __init__(self, path: Path, kind: Kind | None = None) -> None:
        self.path, self.kind = path, kind
        self.is_locked = False

    @contextmanager
    def replace(self) -> Iterator[Path]:
        """An empty folder to write to, which takes this one's place at the end, and vanishes if anything fails."""
        with self.stage() as staged:
            yield staged
            ArtifactFolder(staged, self.kind).write_manifest()
            self.publish(staged)

    @contextmanager
    def stage(self, siblings: str | None = None) -> Iterator[Path]:
        """A new hidden folder beside this one, to write what `publish` puts in its place; it is gone afterward.

        It is locked while it is used. What killed processes left is removed, which is not locked: that of
        folders of this name, or of all beside it whose names match the pattern `siblings`.
        """
        parent = self.path.parent
        with ExitStack() as stack:
            with write_errors(self.path):
                parent.mkdir(parents=True, exist_ok=True)
                with lock_folder(parent):
                    self.restore()
                    ArtifactFolder(parent).remove_leftovers(siblings or glob.escape(self.path.name))
                    staged = hidden_name(self.path, PART)
                    staged.mkdir()
                    stack.callback(remove, staged)
                    stack.enter_context(lock_folder(staged))
            try:
                yield staged
            except OSError as error:
                name_file(error, self.path)
                raise

    def publish(self, staged: Path) -> None:
        """Put a staged folder in place in one step; the one that was there, or the link, is deleted only afterward."""
        replace_folder(staged, self.path)

    def restore(self) -> None:
        """Put back the folder that a kill in `publish` left hidden, where names cannot be exchanged in one step."""
        if not os.path.lexists(self.path):
            for old in sorted(self.path.parent.glob(f".{glob.escape(self.path.name)}-{TOKEN}{OLD}"))[:1]:
                with suppress(OSError):
                    os.replace(old, self.path)

    def delete(self) -> None:
        """Delete the folder, renamed first: a kill leaves no half of it under its name."""
        old = hidden_name(self.path, OLD)
        os.replace(self.path, old)
        remove(old)

    def set_aside(self) -> None:
        """Give a damaged folder a name under which it does not count, and that nothing has yet."""
        suffixes = chain([""], (f"-{n}" for n in count(2)))
        names = (self.path.with_name(f"damaged-{self.path.name}{suffix}") for suffix in suffixes)
        os.rename(self.path, next(name for name in names if not os.path.lexists(name)))

    def write(self, name: str, *, unique: bool = False) -> AbstractContextManager[Path]:
        """A hidden path to write one file of the folder to; see `atomic_write`."""
        return atomic_write(self.path / name, unique=unique)

    def write_text(self, name: str, text: str, *, unique: bool = False) -> None:
        with self.write(name, unique=unique) as staged:
            staged.write_text(text, encoding="utf-8")

    def write_checksummed(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON object with its SHA-256 in it, by which `read_checksummed` knows that nobody has changed it."""
        self.write_text(name, json.dumps({**data, "sha256": digest(data)}, indent=2) + "\n")

    def read_checksummed(self, name: str) -> dict[str, Any] | None:
        """What `write_checksummed` wrote; None where there is nothing, a `DamagedError` where it is something else."""
        file = self.path / name
        if not os.path.lexists(file):
            return None
        data = from_json(read_text(file), file)
        if not isinstance(data, dict) or data.pop("sha256", None) != digest(data):
            raise DamagedError(f"{file} is damaged, or was changed after it was written")
        return data

    def read_own_manifest(self) -> Manifest | None:
        """The manifest of the folder, where it has one; refused where it is that of another kind."""
        manifest = Manifest.read(self.path)
        if manifest is not None and manifest.kind != self.kind:
            raise ValueError(f"{self.path} is a {manifest.kind} folder, and no {self.kind} goes there: {ANOTHER}")
        return manifest

    def check_kind(self) -> None:
        """Refuse a folder that neither is empty nor has a manifest of this kind."""
        if self.read_own_manifest() is None and self.path.is_dir():
            own = {self.path / LOCK, *self.leftovers("*")}
            if others := sorted(path.name for path in self.path.iterdir() if path not in own):
                raise ValueError(
                    f"{self.path} is not empty and holds no {self.kind} (but {name_some(others, 3)}): {ANOTHER}"
                )

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse names under which there is something that the manifest does not list."""
        manifest = self.read_own_manifest()
        listed = {} if manifest is None else manifest.files
        for name in names:
            if name not in listed and os.path.lexists(self.path / name):
                raise ValueError(
                    f"{self.path / name} is not by the {self.kind} in this folder, and is not replaced: move it away, "
                    f"or {ANOTHER}"
                )

    def update(self, files: Mapping[str, bytes]) -> None:
        """Write files into the folder, and into its manifest first; only files that this lists are replaced.

        One process at a time writes, while others wait. After a kill the manifest names what is missing.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = ArtifactFolder(Path(place), "report")
        ...     report.update({"lengths.json": b"{}"})
        ...     report.update({"retrieval.json": b"[]"})
        ...     report.verify(), sorted(os.listdir(place))
        (True, ['lengths.json', 'phasor_manifest.json', 'retrieval.json'])
        """
        assert self.kind is not None
        with write_errors(self.path):
            self.path.mkdir(exist_ok=True)
        with lock_folder(self.path):
            self.check_names(files)
            before = self.read_own_manifest()
            entries = {name: stream_fingerprint(io.BytesIO(content)) for name, content in files.items()}
            manifest = Manifest(self.kind, {**({} if before is None else before.files), **entries})
            with write_errors(self.path):
                for name, content in {MANIFEST: manifest.to_json().encode("utf-8"), **files}.items():
                    with self.write(name) as staged:
                        staged.write_bytes(content)

    def leftovers(self, *names: str) -> list[Path]:
        """What has the hidden name of one of these names in the folder, which are patterns of `glob`."""
        patterns = [f".{name}-{TOKEN}{suffix}" for name in names for suffix in (PART, OLD)]
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    def inside(self, path: Path) -> ArtifactFolder:
        """A folder inside this one, which its lock protects too."""
        inner = ArtifactFolder(path)
        inner.is_locked = self.is_locked
        return inner

    def remove_leftovers(self, *names: str) -> None:
        """Remove what killed processes left of these names, half written or half deleted.

        Unless this process has locked the folder, another one may be writing: what is locked stays.
        """
        for path in self.leftovers(*names):
            with suppress(OSError), nullcontext() if self.is_locked else lock_folder(path, wait=False):
                remove(path)

    @contextmanager
    def lock(self, busy: str) -> Iterator[int]:
        """The open lock file of the folder, for one process at a time; a ValueError `busy` in another one.

        The lock ends with the process, however that ends.
        """
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            try:
                lock(handle)
            except BlockingIOError:
                raise ValueError(busy) from None
            self.is_locked = True
            yield handle
        finally:
            self.is_locked = False
            os.close(handle)

    def write_manifest(self, names: Iterable[str] | None = None) -> None:
        """Write the manifest of the files in the folder, of all of them or of those that are named."""
        assert self.kind is not None
        self.write_text(MANIFEST, Manifest.compute(self.path, self.kind, names).to_json())

    def remove_manifest(self) -> None:
        """Remove the manifest before a file that it lists changes."""
        (self.path / MANIFEST).unlink(missing_ok=True)

    def find_damage(self, names: Iterable[str] | None = None, *, thorough: bool = True) -> Iterator[tuple[str, str]]:
        """The files that are not as they were written, each with what is wrong with it (`Manifest.find_damage`)."""
        manifest = Manifest.read(self.path)
        if manifest is None:
            return iter([(MANIFEST, "is missing")])
        return manifest.find_damage(self.path, names, thorough=thorough)

    def verify(self, names: Iterable[str] | None = None) -> bool:
        """Compare the folder with its manifest; False where it has none, a `DamagedError` where they differ."""
        try:
            manifest = Manifest.read(self.path)
            if manifest is None:
                return False
            if manifest.kind != self.kind:
                raise DamagedError(
                    f"{self.path} is not a {self.kind} folder: by its {MANIFEST} it is a {manifest.kind} folder"
                )
            wrong = [f"{name} {what}" for name, what in manifest.find_damage(self.path, names, thorough=False)]
        except OSError as error:
            raise type(error)(f"{error.filename or self.path} cannot be read: {error.strerror}") from None
        if wrong:
            advice = f"; if you changed it yourself: phasor verify --accept {self.path}" if self.kind == "model" else ""
            raise DamagedError(f"{self.path} is damaged: {name_some(wrong, 5, separator='; ')}{advice}")
        return True


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
    parts += [(folder / "reference", "data")]
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
        manifest = Manifest.read(folder)
        wrong = list(ArtifactFolder(folder).find_damage())
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


def refuse_artifact_file(file: Path) -> None:
    """Refuse to replace a file that the manifest of a folder above it lists, or such a manifest itself."""
    file = file.resolve()
    for folder in file.parents:
        manifest = Manifest.read(folder)
        name = file.relative_to(folder).as_posix()
        if manifest is not None and (name == MANIFEST or name in manifest.files):
            raise ValueError(f"{file} is part of the {manifest.kind} in {folder}, which is left alone: name another")


def accept(folder: str | Path) -> None:
    """Write the manifest of a model folder again, so that its files are right as they are now."""
    folder = path_of(folder)
    try:
        manifest = Manifest.read(folder)
        is_model = manifest is not None and manifest.kind == "model"
    except DamagedError:
        is_model = (folder / "config.json").is_file()
    if not is_model:
        raise ValueError(f"{folder} is not a model folder that phasor wrote: only such a one can be accepted as it is")
    ArtifactFolder(folder, "model").write_manifest()
