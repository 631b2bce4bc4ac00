"""The reference of preferences: its log-probabilities of all replies, computed once and kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints import load
from phasor.checkpoints.folder import read_json, write_json
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.resize import grow_vocabulary
from phasor.checkpoints.runs import REFERENCE
from phasor.checkpoints.tensors import fingerprint_weights
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.packed import PairedRows
from phasor.data.store import Progress
from phasor.files import safetensors_errors
from phasor.manifest import DamagedError
from phasor.nn.mode import eval_mode
from phasor.training.datasets import Datasets
from phasor.training.objectives.base import Start
from phasor.training.objectives.reply_log_probs import log_probs_of
from phasor.training.run import RunFolder
from phasor.transformer import Transformer

if TYPE_CHECKING:
    from phasor.training.trainer import Trainer

DESCRIPTION, VALUES = "reference.json", "log_probs.safetensors"
LogProbs = dict[str, NDArray[np.float32]]


def attach_reference(
    trainer: Trainer, datasets: Datasets, run: RunFolder, progress: Progress, start: Start | None
) -> None:
    """Give the batches of both splits the log-probabilities of the reference, read or computed and stored now."""
    splits = {name: cast(PairedRows, cast(Batches, getattr(datasets, name)).source) for name in ("train", "valid")}
    origin = {"source": source_fingerprint(trainer.recipe), "tokens": datasets.fingerprint}
    found = read_reference(run, origin, begun=start is not None)
    if found is None:
        with reference_model(trainer, datasets, start) as model:
            found = {
                name: log_probs_of(model, rows, trainer.device, trainer.precision, progress)
                for name, rows in splits.items()
            }
        run.write_folder(REFERENCE, lambda staged: write_reference(staged, origin, found))
    for name, rows in splits.items():
        rows.reference = found[name]


def source_fingerprint(recipe: Recipe) -> str | None:
    """A hash of the weights of the reference; None where their folder is no longer there."""
    folder = recipe.preference.reference or recipe.init_from
    if folder is None:  # fresh weights follow from these
        fields = {"model": recipe.model, "seed": recipe.train.seed}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    try:
        return fingerprint_weights(resolve_folder(folder))
    except (ValueError, OSError):
        return None


def read_reference(run: RunFolder, origin: dict[str, Any], *, begun: bool) -> LogProbs | None:
    """The log-probabilities that a run has stored; None where it has none of this reference and these tokens.

    A run that has begun keeps its reference: another one is refused.
    """
    folder = ArtifactFolder(run.path / REFERENCE, "data")
    try:
        if not folder.verify():
            return None
        stored = read_json(folder.path / DESCRIPTION)
    except DamagedError as error:
        run.notify(f"{error}; they are computed again")
        return None
    if begun and origin["source"] not in (None, stored["source"]):
        name = run.recipe.preference.reference or run.recipe.init_from or "the recipe's fresh model"
        raise ValueError(
            f"{name} is no longer the reference that {run.path} began with, by the hash of its weights: bring that "
            "back, or overwrite the run to start from the beginning"
        )
    if stored["tokens"] != origin["tokens"] or (not begun and stored["source"] != origin["source"]):
        return None
    return load_file(folder.path / VALUES)


def write_reference(staged: Path, origin: dict[str, Any], found: LogProbs) -> None:
    """The files of log-probabilities."""
    with safetensors_errors():
        save_file(found, staged / VALUES)
    write_json(staged / DESCRIPTION, origin)


@contextmanager
def reference_model(trainer: Trainer, datasets: Datasets, start: Start | None) -> Iterator[Transformer]:
    """The reference in evaluation mode: a folder's model, or the one the run starts from."""
    folder = trainer.recipe.preference.reference
    if folder is None and start is None:
        with trainer.eval_mode():
            yield trainer.model
        return
    if folder is not None:
        model = load(folder, dtype=torch.float32)
        if model.config.shape != "decoder" or not model.config.has_logits:
            raise ValueError(f"the reference {folder} is not a decoder with logits, which preferences are compared by")
        if model.config.vocab_size < (size := datasets.tokenizer.get_vocab_size()):
            model = grow_vocabulary(model, size)
    else:
        assert start is not None
        model = start()
    with eval_mode(model.to(trainer.device)):
        yield model
