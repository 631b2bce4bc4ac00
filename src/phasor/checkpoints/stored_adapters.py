"""Adapters by their folders: phasor's own, PEFT's, or the checkpoint of a run; and the base that one of them names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from phasor.adapters import DEFAULT, BaseModel
from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.adapter_folder import StoredAdapter, read_adapter
from phasor.checkpoints.folder import ADAPTER, CONFIG, PEFT_CONFIG
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.peft import read_peft
from phasor.checkpoints.run_checkpoint import is_checkpoint, read_checkpoint_adapter
from phasor.checkpoints.tensors import fingerprint_weights
from phasor.config.schema import quote

Folder = str | Path
Adapters = Folder | Mapping[str, Folder | tuple[Folder, float]]  # by name, each with a weight or with 1
Stored = dict[str, tuple[StoredAdapter, float]]


def stored_adapter(folder: Path, *, verify: bool = True) -> StoredAdapter | None:
    """The adapter in a folder; None where it holds a whole model or nothing."""
    if (folder / ADAPTER).is_file():
        if verify:
            ArtifactFolder(folder, "model").verify()
        return read_adapter(folder)
    if (folder / PEFT_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return read_peft(folder)
    return read_checkpoint_adapter(folder) if is_checkpoint(folder) else None


def resolve_base(folder: Path, adapter: Adapters | None = None, *, verify: bool = True) -> tuple[Path, Stored]:
    """The folder of a whole model and the adapters for it: those given, or that which `folder` itself is."""
    own = stored_adapter(folder, verify=verify)
    if own is None:
        stored = {name: (open_adapter(each, verify), weight) for name, (each, weight) in by_name(adapter).items()}
        for each, _ in stored.values():
            check_base(each, folder, verify)
        return folder, stored
    if adapter is not None:
        raise ValueError(f"{folder} is an adapter itself: load its base, with all adapters by name")
    if own.base is None:
        raise ValueError(f"the adapter {folder} does not say what its base is: load the base, with adapter={folder}")
    base = resolve_folder(own.base.folder)
    if not base.exists():
        raise ValueError(f"the base of the adapter {folder} is not at {base}: load the base, with adapter={folder}")
    if stored_adapter(base, verify=False) is not None:
        raise ValueError(f"the base of the adapter {folder} is an adapter, {base}: merge that into its own base")
    check_base(own, base, verify)
    return base, {DEFAULT: (own, 1.0)}


def open_adapter(folder: Folder, verify: bool) -> StoredAdapter:
    """The adapter in a folder, which has to be one."""
    place = resolve_folder(folder)
    found = stored_adapter(place, verify=verify)
    if found is None:
        raise ValueError(f"{place} {'holds no adapter' if place.is_dir() else 'does not exist'}")
    return found


def by_name(adapter: Adapters | None) -> dict[str, tuple[Folder, float]]:
    """Adapters by name, each with its weight.

    >>> by_name("run/model"), by_name({"a": "one", "b": ("two", 0.5)})
    ({'default': ('run/model', 1.0)}, {'a': ('one', 1.0), 'b': ('two', 0.5)})
    """
    if adapter is None:
        return {}
    if isinstance(adapter, str | Path):
        return {DEFAULT: (adapter, 1.0)}
    if not isinstance(adapter, Mapping):
        raise ValueError(f"adapter must be a folder, or a mapping of names to folders, not {quote(adapter)}")
    pairs = {name: given if isinstance(given, tuple) else (given, 1.0) for name, given in adapter.items()}
    for name, pair in pairs.items():
        is_number = len(pair) == 2 and isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
        if not is_number or not math.isfinite(pair[1]):
            raise ValueError(
                f"the adapter {quote(name)} must be a folder, or a folder and a finite weight, not {quote(pair)}"
            )
    return {name: (folder, float(weight)) for name, (folder, weight) in pairs.items()}


def check_base(stored: StoredAdapter, folder: Path, verify: bool) -> None:
    """Refuse an adapter on weights that it was not trained on."""
    if verify and stored.base is not None and stored.base.sha256:
        check_hash(stored.base, folder, f"the adapter {stored.place} was trained")


def check_hash(base: BaseModel, folder: Path, what: str) -> None:
    """Refuse a base whose weights are others than those that were recorded."""
    found = fingerprint_weights(folder)
    if found != base.sha256:
        raise ValueError(
            f"the base {folder} is not the one that {what} on: the SHA-256 of its weights is {found[:12]}..., and was "
            f"{base.sha256[:12]}..."
        )
