"""What a run reads: tokenizers, and batches to train on and to validate with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.batches import Batches
from phasor.data.store import Prepared, Progress, Store, kept, prepare
from phasor.data.tokenizers import Special
from phasor.training.state import Say

DATA = "data"


class Counted(Protocol):
    """Batches by their number, without end, and how many of them show every example once."""

    @property
    def per_epoch(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class Material:
    """Tokenizers and batches; `source_tokenizer` is None where both sides of a pair share one."""

    tokenizer: Any
    train: Counted
    valid: Counted
    special: Special
    source_tokenizer: Any = None
    skipped: int = 0  # pairs that are longer than the recipe allows
    fingerprint: str = ""  # a hash of all tokens


def material(
    recipe: Recipe, folder: Path, progress: Progress, fingerprint: str | None = None, say: Say = lambda sentence: None
) -> Material:
    """Prepare a recipe's data, in its cache or else in the run's folder, or find them prepared.

    Either way they are found as `data` in the run's folder afterward. A run that goes on has a `fingerprint`: it
    keeps the tokens it began with, whatever became of the files they were made from.
    """
    place = folder / DATA
    prepared = None if fingerprint is None else own(recipe, place, fingerprint, say)
    if prepared is None:
        prepared = prepare(recipe, place, progress, fingerprint)
    if prepared.folder != place and (place.is_symlink() or not place.exists()):
        link = folder / f".{DATA}.part"
        link.unlink(missing_ok=True)
        link.symlink_to(prepared.folder.resolve(), target_is_directory=True)
        os.replace(link, place)
    shared = prepared.source_tokenizer is prepared.tokenizer

    def batches(store: Store) -> Batches:
        return Batches(store, recipe, special=prepared.special, vocab_size=prepared.vocab_size)

    return Material(
        tokenizer=prepared.tokenizer,
        source_tokenizer=None if shared else prepared.source_tokenizer,
        special=prepared.special,
        train=batches(prepared.train),
        valid=batches(prepared.valid),
        skipped=prepared.skipped,
        fingerprint=prepared.fingerprint,
    )


def own(recipe: Recipe, place: Path, fingerprint: str, say: Say) -> Prepared | None:
    """The data a run began with, if it still has them."""
    found = kept(recipe, place, fingerprint)
    if found is None:
        return None
    if not found[1]:
        say(f"the data are no longer as they were: the run goes on with the tokens it began with, in {place}")
    return found[0]
