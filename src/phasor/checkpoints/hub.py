"""Find a model's folder: a path, or a name on the Hugging Face hub, which is fetched into the hub's cache."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path
from typing import Literal, NamedTuple, Self

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.folder import ADAPTER_FILES, CONFIG, INDEX, PICKLES, TOKENIZER_FILES, WEIGHTS, index_of
from phasor.checkpoints.runs import find_weights, is_run
from phasor.config.schema import quote
from phasor.config.text_files import path_of, read_text
from phasor.distribution import missing_package
from phasor.progress import Progress

Files = Literal["model", "config", "tokenizer"]  # what of a repository is needed: all of it, or one part
MAIN = "main"
NAME = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][A-Za-z0-9_.-]*/)?[A-Za-z0-9][A-Za-z0-9_.-]*(?<![.-])")
REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][A-Za-z0-9_./+-]*(?<![./])")
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST = 96  # characters of a name, by the rules of the hub
# What names a file, and no repository.
SUFFIXES = (".json", ".jsonl", ".safetensors", ".txt", ".yaml", ".yml")
ON = ("1", "ON", "YES", "TRUE")  # values of a variable that is set, as huggingface_hub reads them


class UnreachableError(ValueError):
    """The hub cannot be asked: there is no network, or it does not answer."""


class HubName(NamedTuple):
    """A model's repository on the hub, and its branch, tag or commit."""

    name: str
    revision: str = MAIN

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The repository that a text names, as OWNER/NAME or OWNER/NAME@REVISION; None where it cannot be one.

        >>> HubName.parse("Qwen/Qwen3-0.6B"), HubName.parse("gpt2@e7da7f2"), HubName.parse("runs/1/model")
        (HubName(name='Qwen/Qwen3-0.6B', revision='main'), HubName(name='gpt2', revision='e7da7f2'), None)
        """
        name, at, revision = text.partition("@")
        if not NAME.fullmatch(name) or len(name) > LONGEST or text.endswith(SUFFIXES):
            return None
        if at and (not REVISION.fullmatch(revision) or len(revision) > LONGEST):
            raise ValueError(f"{name}: a revision is a branch, a tag or a commit, not {quote(revision)}")
        return cls(name, revision) if at else cls(name)

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"

    @property
    def entry(self) -> Path:
        """Its folder in the hub's cache."""
        return hub_cache() / f"models--{self.name.replace('/', '--')}"


def resolve_folder(
    folder: str | Path,
    checkpoint: str | int | None = None,
    *,
    files: Files = "model",
    progress: Progress | None = None,
) -> Path:
    """A folder that holds a model: the one given, the weights of a run, or the snapshot of a hub cache's entry.

    What is no folder here and could be the name of a repository on the hub is taken from its cache, into which `files`
    are fetched that it lacks. `checkpoint` asks for a checkpoint of a run (`find_weights`).
    """
    path = path_of(folder)
    ArtifactFolder(path).restore()
    if is_run(path):
        return find_weights(path, None if checkpoint is None else str(checkpoint))
    if checkpoint is not None:
        raise ValueError(f"checkpoint is for the folder of a run, and {path} is none")
    if not os.path.lexists(path):
        name = HubName.parse(str(folder))
        return path if name is None else find_snapshot(name, files, progress)
    snapshots = path / "snapshots"
    if (path / CONFIG).exists() or not snapshots.is_dir():
        return path
    referred = referred_snapshot(path, MAIN)
    if referred is not None:
        return referred
    found = sorted(snapshots.iterdir())
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} snapshots and no refs/main that names one: give the snapshot's folder"
        )
    return found[0]


def pin_commit(folder: str) -> str:
    """A name on the hub with the commit that its branch or tag stands for now; the path of a folder as it is."""
    name = None if os.path.lexists(folder) else HubName.parse(folder)
    if name is None:
        return folder
    commit = find_snapshot(name, "config").name
    return str(HubName(name.name, commit)) if COMMIT.fullmatch(commit) else folder


def find_snapshot(hub: HubName, files: Files, progress: Progress | None = None) -> Path:
    """The snapshot of a repository in the cache, with what it lacks fetched from the hub.

    Where the hub cannot be asked, the snapshot is taken as it was fetched last, if it has what is needed.
    """
    cached = cached_snapshot(hub)
    if cached is not None and not has_files(cached, files):
        cached = None
    can_ask = importlib.util.find_spec("huggingface_hub") is not None and offline_variable() is None
    if cached is not None and not can_ask:
        return cached
    if not can_ask:
        missing = f"there is no folder {hub} here, and no {files} of that name in the Hugging Face hub's cache"
        if (variable := offline_variable()) is not None:
            raise ValueError(f"{missing}, {hub_cache()}; {variable} forbids to fetch it: unset that variable")
        raise missing_package(f"{missing}, {hub_cache()}; to fetch it phasor needs the package huggingface_hub", "hub")
    from phasor.checkpoints.hub_download import download

    try:
        return download(hub, files, progress)
    except UnreachableError as error:
        if cached is None:
            raise UnreachableError(f"there is no folder {hub} here, and {error}") from None
        warnings.warn(f"{error}; {hub} is read as it was fetched last", stacklevel=2)
        return cached


def cached_snapshot(hub: HubName) -> Path | None:
    """The folder of a revision in the hub's cache; None where it has not been fetched."""
    snapshot = hub.entry / "snapshots" / hub.revision  # of a commit
    return snapshot if snapshot.is_dir() else referred_snapshot(hub.entry, hub.revision)


def referred_snapshot(entry: Path, revision: str) -> Path | None:
    """The snapshot that a cache's entry has for a branch or tag."""
    reference = entry / "refs" / revision
    if not reference.is_file():
        return None
    name = read_text(reference).strip()
    if not name or Path(name).name != name:
        raise ValueError(f"{reference} must name a folder in {entry / 'snapshots'}, not {quote(name)}")
    return entry / "snapshots" / name


def has_files(snapshot: Path, files: Files) -> bool:
    """Whether a snapshot has what is needed: weights are fetched last, so that with them there is all of a model."""
    if any(all((snapshot / name).exists() for name in pair) for pair in ADAPTER_FILES):
        return True
    if files == "tokenizer":
        return any((snapshot / name).exists() for name in TOKENIZER_FILES)
    if files == "config" or not (snapshot / CONFIG).exists():
        return (snapshot / CONFIG).exists()
    if (snapshot / INDEX).exists() and not (snapshot / WEIGHTS).exists():
        return all((snapshot / name).exists() for name in index_of(snapshot / INDEX).values())
    return any(next(snapshot.glob(pattern), None) for pattern in (WEIGHTS, *PICKLES))


def hub_cache() -> Path:
    """The hub's cache, by the variables that say where it is; the first that is set counts."""
    places = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    for variable, inside in places.items():
        if variable in os.environ:
            return Path(os.path.expandvars(os.environ[variable])).expanduser() / inside
    return Path.home() / ".cache" / "huggingface" / "hub"


def offline_variable() -> str | None:
    """The variable that forbids to ask the hub, of huggingface_hub or of transformers; None where none does."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ON), None)
