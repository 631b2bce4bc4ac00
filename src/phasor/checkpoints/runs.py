"""Run folders as everything sees them: the file that proves that `train` wrote a folder, and says what it wrote."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from phasor.artifacts import RUN_MARKER, ArtifactFolder
from phasor.checkpoints.folder import read_json
from phasor.config.recipe import Recipe
from phasor.config.schema import name_some, quote
from phasor.files import PART, TOKEN
from phasor.manifest import MANIFEST, DamagedError, digest

MARKER, RECIPE, MODEL, CHECKPOINTS, DATA = RUN_MARKER, "recipe.json", "model", "checkpoints", "data"
TOKENIZER_FOLDER = "tokenizer"  # the files of the tokenizer of a model that is fine-tuned
REFERENCE = "reference"  # the log-probabilities of preferences by their reference
KIND, VERSION = "run", 1
BEGINNING = b'{\n  "phasor": "run",\n  "version": '  # of a marker
VALUES = "state.json"  # of a checkpoint: everything but its tensors
NAME = re.compile(r"step-(\d{8,})")


class RunMarker:
    """`run.json`, the first file of a run folder: it is written while the folder is empty.

    It lists the names that the run uses in its folder. Any other belongs to somebody else, and is never replaced or
    deleted. It also holds the recipes of the run, each with the step from which it was in use, and the step of
    the newest checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     marker = RunMarker.create(Path(folder), Recipe())
    ...     marker.claim("metrics.jsonl")
    ...     is_run(Path(folder)), sorted(RunMarker.read(Path(folder)).names)
    (True, ['metrics.jsonl'])
    """

    def __init__(
        self, folder: Path, recipes: list[dict[str, Any]], names: dict[str, str | None], saved: int | None = None
    ) -> None:
        self.folder, self.recipes, self.names = folder, recipes, names  # a name with a text is a link to that
        self.saved = saved  # the step of the newest checkpoint

    @classmethod
    def create(cls, folder: Path, recipe: Recipe, names: Iterable[str] = ()) -> Self:
        """Mark an empty folder as that of a run, which uses these names."""
        marker = cls(folder, [{"step": 0, "recipe": recipe.to_dict()}], dict.fromkeys(names))
        marker.write(unique=True)  # two processes may do so at once
        return marker

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The marker of a folder; None where there is none, or something else under its name.

        One that is not as it was written is an error, and one that cannot be read another.
        """
        try:
            if not stat.S_ISREG(os.lstat(folder / MARKER).st_mode):
                return None
            content = (folder / MARKER).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OSError(f"{folder / MARKER} cannot be read: {error.strerror}") from None
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict) or data.get("phasor") != KIND or data.get("version") != VERSION:
            if not content.startswith(BEGINNING):
                return None
            data = {}
        if data.pop("sha256", None) != digest(data):
            raise DamagedError(f"{folder / MARKER} is damaged, or was changed after it was written")
        return cls(folder, data["recipes"], data["names"], data.get("saved"))

    def write(self, *, unique: bool = False) -> None:
        data: dict[str, Any] = {"phasor": KIND, "version": VERSION, "names": self.names, "recipes": self.recipes}
        data["saved"] = self.saved
        data["sha256"] = digest(data)
        self.remove_manifest()
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        ArtifactFolder(self.folder).write_text(MARKER, text, unique=unique)

    def remove_manifest(self) -> None:
        """Remove the manifest of the folder before a file in it changes; the end of the run writes it again."""
        if MANIFEST in self.names:
            ArtifactFolder(self.folder).remove_manifest()

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe that the run had last."""
        return self.recipes[-1]["recipe"]

    def start(self, recipe: Recipe, source: str | None) -> None:
        """Note a run from the beginning, with the fingerprint of the model that it starts from, if any."""
        self.recipes = [{"step": 0, "changes": [], "recipe": recipe.to_dict(), "source": source}]
        self.write()

    def add_recipe(self, step: int, recipe: Recipe, changes: list[str]) -> None:
        """Note that from a step on the run has another recipe."""
        self.recipes.append({"step": step, "changes": changes, "recipe": recipe.to_dict()})
        self.write()

    def record_checkpoint(self, step: int | None) -> None:
        """Note that there is a checkpoint of a step, or none."""
        self.saved = step
        self.write()

    def claim(self, name: str, link: str | None = None) -> None:
        """Note that a name is the run's, before it is written; refused where somebody else has used it."""
        if name in self.names and self.names[name] == link:
            return
        if name not in self.names and os.path.lexists(self.folder / name):
            raise ValueError(f"{self.folder / name} was not written by this run: move it away")
        self.names[name] = link
        self.write()

    def owns(self, name: str) -> bool:
        """Whether what has a name, if anything, is the run's: a link only if the run made it and it points there."""
        path = self.folder / name
        if name not in self.names:
            return not os.path.lexists(path)
        return self.names[name] == os.readlink(path) if path.is_symlink() else True


def is_run(folder: Path) -> bool:
    """Whether a folder is one that `train` writes to."""
    return RunMarker.read(folder) is not None


def entries(folder: Path) -> list[str]:
    """The names in a folder, none if it is not there; without what a kill may have left of a marker."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OSError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(name for name in names if not fnmatchcase(name, f".{MARKER}-{TOKEN}{PART}"))


def checkpoint_name(step: int) -> str:
    """
    >>> checkpoint_name(200)
    'step-00000200'
    """
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, by step, the oldest first; whole or not."""
    named = ((NAME.fullmatch(name), folder / name) for name in entries(folder))
    return sorted((int(match[1]), entry) for match, entry in named if match)


def find_weights(run: Path, which: str | None = None) -> Path:
    """The folder of a run that holds its weights: its model, or else its best or its newest whole checkpoint.

    `which` asks for a checkpoint: "best", "last" (the newest whole one), or the number of its step.
    """
    if which is None and os.path.lexists(run / MODEL):
        return run / MODEL
    existing = dict(checkpoints(run / CHECKPOINTS))
    if which not in (None, "best", "last"):
        if not which.isdecimal() or int(which) not in existing:
            known = name_some([*(["best", "last"] if existing else []), *sorted(existing)]) or "none"
            raise ValueError(f"{run} has no checkpoint {quote(which)}; there are: {known}")
        return existing[int(which)]
    whole = (step for step in sorted(existing, reverse=True) if is_whole(existing[step]))
    newest = next(whole, None)
    if newest is None:
        nothing = "no whole checkpoint" if which else "neither a model nor a whole checkpoint"
        raise ValueError(f"{run} has {nothing}: it has not been trained that far")
    best = None if which == "last" else read_json(existing[newest] / VALUES)["values"].get("best_step")
    return existing[best if best in existing and is_whole(existing[best]) else newest]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint is as it was written; an OSError where it cannot be read."""
    try:
        return not any(ArtifactFolder(folder).find_damage())
    except ValueError:
        return False


def is_marker_part(path: Path) -> bool:
    """Whether a file is what a kill left of a marker: it begins as one does, or ends before that could be seen."""
    if path.is_symlink() or not path.is_file():
        return False
    content = path.read_bytes()
    return content.startswith(BEGINNING) or BEGINNING.startswith(content)
