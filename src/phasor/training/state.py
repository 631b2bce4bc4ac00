"""Checkpoints of a run, one folder a step: written whole or not at all, and checked byte by byte when read.

A checkpoint is staged beside its place, flushed to the disk and renamed, so a kill at any moment leaves only whole
ones. Its manifest holds the SHA-256 of every file. Tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasor.checkpoints.folder import read_json, swap, write_json

NUMBERS, MANIFEST = "state.json", "manifest.json"
NAME = re.compile(r"step-(\d{8,})")
Say = Callable[[str], None]


class NotSavedError(OSError):
    """A checkpoint could not be written; the message says which are left."""


@dataclass(frozen=True)
class State:
    """What a checkpoint holds: groups of tensors by name, and numbers."""

    folder: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    numbers: dict[str, Any]


def checkpoint_name(step: int) -> str:
    """
    >>> checkpoint_name(200)
    'step-00000200'
    """
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, by step, the oldest first; whole or not."""
    if not folder.is_dir():
        return []
    named = ((NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match[1]), entry) for match, entry in named if match)


def save_state(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], numbers: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of a step; if anything fails, those that were there stay as they were.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = save_state(Path(folder), 7, {"model": {"weight": torch.ones(3)}}, {"skips": 0})
    ...     load_newest(Path(folder)).numbers, made.name
    ({'skips': 0}, 'step-00000007')
    """
    place = folder / checkpoint_name(step)
    staged = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{place.name}-", suffix=".part", dir=folder))
        for group, named in tensors.items():
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            save_file(held, staged / f"{group}.safetensors", {"format": "pt"})
        write_json(staged / NUMBERS, {"step": step, "numbers": dict(numbers)})
        files = {file.name: fingerprint(file) for file in sorted(staged.iterdir())}
        write_json(staged / MANIFEST, {"files": files})
        for file in (*staged.iterdir(), staged):
            flush(file)
        swap(staged, place)
        flush(folder)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk raises under safetensors
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the checkpoint of step {step} cannot be written to {folder}: {reason}; {left(folder)}"
        raise NotSavedError(message) from None
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    return place


def left(folder: Path) -> str:
    """What there is to go on from after a checkpoint could not be written."""
    newest = newest_whole(folder)
    return "there is none before it" if newest is None else f"the newest whole one is {newest[1].name}"


def load_newest(folder: Path, say: Say = lambda sentence: None) -> State | None:
    """The newest whole checkpoint, or None; every damaged one that is passed over is named to `say`."""
    found = newest_whole(folder, say)
    if found is None:
        return None
    step, place = found
    groups = [name.removesuffix(".safetensors") for name in listed(place) if name.endswith(".safetensors")]
    tensors = {group: load_file(place / f"{group}.safetensors") for group in groups}
    return State(place, step, tensors, read_json(place / NUMBERS)["numbers"])


def newest_whole(folder: Path, say: Say = lambda sentence: None) -> tuple[int, Path] | None:
    """Step and folder of the newest checkpoint that is as it was written."""
    for step, place in reversed(checkpoints(folder)):
        wrong = damage(place, step)
        if wrong is None:
            return step, place
        say(f"the checkpoint {place} is damaged and is passed over: {wrong}")
    return None


def damage(place: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, in words; None where it is as it was written."""
    try:
        files = listed(place)
        for name, wanted in files.items():
            if not (place / name).is_file():
                return f"{name} is missing"
            found = fingerprint(place / name)
            if found["bytes"] != wanted["bytes"]:
                return f"{name} has {found['bytes']} bytes and not {wanted['bytes']}"
            if found["sha256"] != wanted["sha256"]:
                return f"{name} is not what was written, by its SHA-256"
        if read_json(place / NUMBERS).get("step") != step:
            return f"{NUMBERS} is of another step"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return " ".join(str(error).split()) or "it cannot be read"
    return None


def listed(place: Path) -> dict[str, Any]:
    """The files of a checkpoint and their fingerprints, by its manifest."""
    files = read_json(place / MANIFEST).get("files")
    if not isinstance(files, dict) or NUMBERS not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"{MANIFEST} does not list its files")
    return files


def prune(folder: Path, keep: int, best: int | None = None) -> None:
    """Delete all but the `keep` newest checkpoints, the best one and the newest whole one."""
    there = checkpoints(folder)
    old = [place for step, place in there[: max(0, len(there) - keep)] if step != best]
    whole = newest_whole(folder) if old else None
    for place in old:
        if whole is None or place == whole[1]:
            continue
        doomed = place.with_name(f".{place.name}.old")  # renamed first: a kill leaves no half of one behind
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(place, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a kill left half written or half deleted."""
    for pattern in (".step-*.part", ".step-*.old"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints newer than a step, which are damaged if it is the newest whole one's."""
    for newer, place in checkpoints(folder):
        if newer > step:
            aside = place.with_name(f"damaged-{place.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(place, aside)


def fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def changes(before: Any, now: Any, at: str = "") -> list[str]:
    """How one JSON value differs from another, field by field.

    >>> changes({"dim": 64, "norm": {"kind": "rmsnorm"}}, {"dim": 128, "norm": {"kind": "rmsnorm"}}, "model")
    ['model.dim was 64 and is 128']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys((*before, *now))
        return [line for n in names for line in changes(before.get(n), now.get(n), f"{at}.{n}" if at else n)]
    return [] if before == now else [f"{at} was {json.dumps(before)} and is {json.dumps(now)}"]
