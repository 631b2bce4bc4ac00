"""The data of a run: tokenizers, and batches to train on and to validate with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.checkpoints.runs import DATA
from phasor.config.model import Shape
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.batches import Batches
from phasor.data.examples import examples_of
from phasor.data.mixture import SourceShare, describe_mixture, mix
from phasor.data.store import PreparedData, Progress, TokenStore, find_prepared_data, prepare
from phasor.data.tokenizers import SpecialIds
from phasor.files import replace_link
from phasor.manifest import DamagedError
from phasor.training.progress import SplitSize
from phasor.training.run import RunFolder
from phasor.training.state import Notify


class EpochBatches(Protocol):
    """Batches by their index, without end; `per_epoch` of them hold every example once."""

    @property
    def per_epoch(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class Datasets:
    """Tokenizers and batches; `source_tokenizer` is None where both sides of a pair share one."""

    tokenizer: Any
    train: EpochBatches
    valid: EpochBatches
    special: SpecialIds
    source_tokenizer: Any = None
    left_out: tuple[str, ...] = ()  # examples that are skipped, in words
    mixture: tuple[SourceShare, ...] = ()  # what an epoch has of each source
    template: ChatTemplate | None = None
    end_of_turn: int | None = None  # the token with which a reply ends
    fingerprint: str = ""  # a hash of all tokens
    longest: int | None = None  # tokens of the longest sequence that is trained on, where that is known
    labels: tuple[str, ...] = ()  # of a classifier
    sizes: tuple[SplitSize, SplitSize] = (SplitSize(0, 0), SplitSize(0, 0))  # to train on, to validate with


def load_datasets(
    recipe: Recipe, run: RunFolder, progress: Progress, fingerprint: str | None = None, shape: Shape | None = None
) -> Datasets:
    """Prepare a recipe's data, in its cache or else in the run's folder, or open them if they are prepared.

    Either way they are `data` in the run's folder afterward. A run that is resumed has a `fingerprint`: it keeps the
    tokens it began with, even if the files they were made from have changed. It also knows the model's `shape`.
    """
    place = run.path / DATA
    prepared = None if fingerprint is None else open_own(recipe, place, fingerprint, run.notify)
    if prepared is None:
        if recipe.data.cache is None:
            if place.is_symlink():  # of a run that had a cache before
                place.unlink()
            run.claim(DATA)
        prepared = prepare(recipe, place, progress, fingerprint, run.notify)
        if prepared.folder != place and (place.is_symlink() or not place.exists()):
            place.unlink(missing_ok=True)
            run.marker.claim(DATA, link=str(prepared.folder.resolve()))
            replace_link(place, prepared.folder)
    datasets = build_datasets(recipe, prepared, shape)
    for line in describe_mixture(datasets.mixture):
        run.notify(line)
    return datasets


def follow_datasets(recipe: Recipe, run: RunFolder, fingerprint: str, shape: Shape | None = None) -> Datasets:
    """The data that another process of the run has prepared, for one of the others."""
    prepared = open_own(recipe, run.path / DATA, fingerprint, run.notify)
    if prepared is None:
        raise ValueError(
            f"{(run.path / DATA).resolve()} is not on all machines of the run: Recipe.out and DataConfig.cache have to "
            "be folders that they share"
        )
    return build_datasets(recipe, prepared, shape)


def build_datasets(recipe: Recipe, prepared: PreparedData, shape: Shape | None = None) -> Datasets:
    """The batches of a recipe from its prepared data, for a model of a shape or of that of the recipe's."""
    shared = prepared.source_tokenizer is prepared.tokenizer

    def batches(store: TokenStore, **options: bool) -> Batches:
        return Batches(
            store,
            recipe,
            special=prepared.special,
            vocab_size=prepared.vocab_size,
            tokenizer=prepared.tokenizer,
            shape=shape,
            **options,
        )

    sides = list(examples_of(recipe, shape).token_sides)
    store, shares = prepared.train, list[SourceShare]()
    if recipe.data.mixture:
        lengths = prepared.train.lengths[:, sides].sum(axis=1)
        store, shares = mix(prepared.train, lengths, prepared.train.sources, recipe.data.mixture)
    train = batches(store, training=True)
    return Datasets(
        tokenizer=prepared.tokenizer,
        source_tokenizer=None if shared else prepared.source_tokenizer,
        special=prepared.special,
        train=train,
        valid=batches(prepared.valid),
        left_out=prepared.left_out,
        mixture=tuple(shares),
        template=prepared.template,
        end_of_turn=prepared.end_of_turn,
        fingerprint=prepared.fingerprint,
        longest=train.longest,
        labels=tuple(prepared.summary.get("labels", ())),
        sizes=(split_size(store, sides), split_size(prepared.valid, sides)),
    )


def split_size(store: TokenStore, sides: list[int]) -> SplitSize:
    """The examples of a store, and the tokens of these sides of them."""
    return SplitSize(len(store), int(store.lengths[:, sides].sum()))


def open_own(recipe: Recipe, place: Path, fingerprint: str, notify: Notify) -> PreparedData | None:
    """The data a run began with, if it still has them as they were written."""
    try:
        found = find_prepared_data(recipe, place, fingerprint)
    except DamagedError as error:
        notify(f"{error}; the data are prepared again")
        return None
    if found is None:
        return None
    prepared, up_to_date = found
    if not up_to_date:
        notify(f"the data are no longer as they were: the run continues with the tokens it began with, in {place}")
    return prepared
