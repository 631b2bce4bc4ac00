"""Checkpoints of a run, one folder per step: written whole or not at all, and checked byte by byte when read.

A checkpoint is staged beside its place, flushed to the disk and renamed, so a kill at any moment leaves only whole
ones. Its manifest (`manifest.py`) holds the SHA-256 of every file. Tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.folder import read_json, write_json
from phasor.checkpoints.runs import VALUES, checkpoint_name
from phasor.checkpoints.runs import checkpoints as checkpoints
from phasor.checkpoints.tensors import TensorSource, write_sources
from phasor.config.schema import differences, name_some
from phasor.files import safetensors_errors
from phasor.manifest import MANIFEST, Manifest

Notify = Callable[[str], None]


class NotSavedError(OSError):
    """A checkpoint could not be written; the message says which are left."""


class UnreadableError(OSError):
    """A checkpoint is there and cannot be read, which does not mean that it is damaged."""


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds: groups of tensors by name, and values such as the step and the best loss."""

    folder: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]


Tensors = Mapping[str, Tensor] | Sequence[TensorSource]  # a group of tensors, all there or made one by one


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensors], values: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step; if anything fails, those that were there stay as they were.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_state(Path(folder), 7, {"model": {"weight": torch.ones(3)}}, {"skips": 0})
    ...     load_newest(Path(folder)).values, saved.name
    ({'skips': 0}, 'step-00000007')
    """
    place = folder / checkpoint_name(step)
    try:
        with ArtifactFolder(place, "checkpoint").replace() as staged:
            for group, named in tensors.items():
                file = staged / f"{group}.safetensors"
                if isinstance(named, Mapping):
                    held = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
                    with safetensors_errors():
                        save_file(held, file, {"format": "pt"})
                else:
                    write_sources(file, named)
            write_json(staged / VALUES, {"step": step, "values": dict(values)})
    except OSError as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or str(error)
        message = f"the checkpoint of step {step} cannot be written to {folder}: {reason}; {describe_remaining(folder)}"
        raise NotSavedError(message) from None
    return place


def describe_remaining(folder: Path) -> str:
    """What there is to resume from after a checkpoint could not be written."""
    try:
        newest = newest_intact(folder)
    except OSError as error:
        return str(error)
    return "there is none before it" if newest is None else f"the newest whole one is {newest[1].name}"


def load_newest(folder: Path, notify: Notify = lambda message: None) -> TrainingState | None:
    """The newest whole checkpoint, or None; every damaged one that is passed over is named to `notify`."""
    newest = newest_intact(folder, notify)
    if newest is None:
        return None
    return read_checkpoint(*newest)


def unusable_reason(step: int, place: Path) -> str | None:
    """Why a checkpoint cannot be taken, in a sentence; None where it is as it was written."""
    try:
        wrong = damage(place, step)
    except UnreadableError as error:
        return str(error)
    return None if wrong is None else f"the checkpoint {place} is damaged: {wrong}"


def read_checkpoint(step: int, place: Path) -> TrainingState:
    """What a checkpoint holds that is known to be whole."""
    groups = [name.removesuffix(".safetensors") for name in manifest_files(place) if name.endswith(".safetensors")]
    tensors = {group: load_file(place / f"{group}.safetensors") for group in groups}
    return TrainingState(place, step, tensors, read_json(place / VALUES)["values"])


def newest_intact(folder: Path, notify: Notify = lambda message: None) -> tuple[int, Path] | None:
    """Step and folder of the newest checkpoint that is as it was written."""
    for step, place in reversed(checkpoints(folder)):
        wrong = damage(place, step)
        if wrong is None:
            return step, place
        notify(f"the checkpoint {place} is damaged and is passed over: {wrong}")
    return None


def damage(place: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, in words; None where it is as it was written.

    One that cannot be read (no permission, a disk or network that fails, too many open files) is not damaged for all
    that is known: it is an error.
    """
    try:
        wrong = [f"{name} {what}" for name, what in ArtifactFolder(place).find_damage()]
        if wrong:
            return name_some(wrong, 5, separator="; ")
        if VALUES not in manifest_files(place) or read_json(place / VALUES).get("step") != step:
            return f"{VALUES} is of another step"
    except OSError as error:
        raise UnreadableError(
            f"the checkpoint {place} cannot be read ({error.strerror}), and whether it is whole is not known: "
            "nothing was changed"
        ) from None
    except ValueError as error:
        return " ".join(str(error).split()) or "it cannot be read"
    return None


def manifest_files(place: Path) -> list[str]:
    """The files of a checkpoint, by its manifest."""
    manifest = Manifest.read(place)
    return [] if manifest is None or manifest.kind != "checkpoint" else list(manifest.files)


def is_deletable(place: Path) -> bool:
    """Whether a folder may be deleted as a checkpoint: it can be read, and holds what its manifest lists, no more."""
    try:
        files = manifest_files(place)
        return bool(files) and not place.is_symlink() and {*os.listdir(place)} <= {MANIFEST, *files}
    except (OSError, ValueError):
        return False


def prune(folder: Path, keep: int, best: int | None = None, notify: Notify = lambda message: None) -> None:
    """Delete all but the `keep` newest checkpoints, the best one and the newest whole one; none that cannot be read."""
    existing = checkpoints(folder)
    old = [place for step, place in existing[: max(0, len(existing) - keep)] if step != best]
    if not old:
        return
    try:
        whole = newest_intact(folder)
    except UnreadableError as error:
        notify(str(error))
        return
    for place in old:
        if whole is not None and place != whole[1] and is_deletable(place):
            ArtifactFolder(place).delete()


def remove_checkpoints(folder: Path) -> None:
    """Delete all checkpoints; what cannot be told to be one is renamed."""
    for _, place in checkpoints(folder):
        if is_deletable(place):
            ArtifactFolder(place).delete()
        else:
            ArtifactFolder(place).set_aside()


def rename_damaged_checkpoints(folder: Path, step: int) -> None:
    """Rename the checkpoints newer than a step, which are damaged if it is that of the newest whole one."""
    for newer, place in checkpoints(folder):
        if newer > step:
            ArtifactFolder(place).set_aside()


def describe_changes(before: Any, now: Any, name: str = "") -> list[str]:
    """How one JSON value differs from another, field by field.

    >>> describe_changes({"dim": 64, "norm": {"kind": "rmsnorm"}}, {"dim": 128, "norm": {"kind": "rmsnorm"}}, "model")
    ['model.dim was 64 and is 128']
    """
    changes = differences(before, now, name)
    return [f"{field} was {json.dumps(old)} and is {json.dumps(new)}" for field, old, new in changes]
