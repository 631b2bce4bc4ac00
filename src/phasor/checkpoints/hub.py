"""Find a model's folder: a path, or a name in the Hugging Face hub's cache."""

from __future__ import annotations

import os
from pathlib import Path

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.folder import CONFIG
from phasor.checkpoints.runs import find_weights, is_run
from phasor.config.schema import quote
from phasor.config.text_files import path_of, read_text


def resolve_folder(folder: str | Path, checkpoint: str | int | None = None) -> Path:
    """A folder that holds a model: the one given, the weights of a run, or the snapshot of a hub cache's entry.

    Such an entry is given by its folder or by its name. `checkpoint` asks for a checkpoint of a run (`find_weights`).
    """
    path = path_of(folder)
    ArtifactFolder(path).restore()
    if is_run(path):
        return find_weights(path, None if checkpoint is None else str(checkpoint))
    if checkpoint is not None:
        raise ValueError(f"checkpoint is for the folder of a run, and {path} is none")
    if not path.exists() and str(folder).count("/") < 2:
        entry = hub_cache() / f"models--{str(folder).replace('/', '--')}"
        path = entry if entry.is_dir() else path
    snapshots = path / "snapshots"
    if (path / CONFIG).exists() or not snapshots.is_dir():
        return path
    reference = path / "refs" / "main"
    if reference.is_file():
        name = read_text(reference).strip()
        if not name or Path(name).name != name:
            raise ValueError(f"{reference} must name a folder in {snapshots}, not {quote(name)}")
        return snapshots / name
    found = sorted(snapshots.iterdir())
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} snapshots and no refs/main that names one: give the snapshot's folder"
        )
    return found[0]


def hub_cache() -> Path:
    """The hub's cache, by the variables that say where it is; the first that is set counts."""
    places = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    for variable, inside in places.items():
        if variable in os.environ:
            return Path(os.path.expandvars(os.environ[variable])).expanduser() / inside
    return Path.home() / ".cache" / "huggingface" / "hub"


def hub_hint(folder: Path) -> str:
    """What to say besides where a folder is missing that could be a model's name on the hub: nothing is downloaded.

    >>> hub_hint(Path("runs/1/model"))
    ''
    """
    if folder.exists() or len(folder.parts) != 2 or folder.parts[0] in ("/", ".."):
        return ""
    return (
        f"; if it is a model on the Hugging Face hub: phasor downloads nothing, and it is not in the cache, "
        f"{hub_cache()}, where `hf download {folder}` puts it"
    )
