"""`preview`: what a model will see of a recipe's data, and which of it is trained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phasor.config.recipe import Recipe
from phasor.config.schema import check_integer
from phasor.data.batch import Batch
from phasor.data.mixture import SourceShare
from phasor.data.store import prepare
from phasor.training.datasets import Datasets, build_datasets
from phasor.training.progress import SplitSize, TrainingProgress


@dataclass(frozen=True)
class Run:
    """A stretch of text, and whether its tokens are trained: predicted, and counted in the loss."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownText:
    """One of the texts of a row: what it is, how many tokens it and its trained part have, and its runs."""

    name: str
    tokens: int
    trained: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Preview:
    """Rows of one step of training or of validation, and what the data are as a whole."""

    step: int
    rows: tuple[tuple[ShownText, ...], ...]  # those of the step that were asked for
    rows_of_step: int
    tokens_of_step: int  # places of all its rows, with padding
    trained_of_step: int
    steps_per_epoch: int
    train: SplitSize
    valid: SplitSize
    left_out: tuple[str, ...]
    mixture: tuple[SourceShare, ...]


def preview(
    recipe: Recipe,
    *,
    rows: int = 4,
    step: int = 0,
    split: Literal["train", "valid"] = "train",
    progress: TrainingProgress | None = None,
) -> Preview:
    """The first rows of a batch as texts, after templates, masks and packing, with what is trained marked.

    The data are prepared as for training, in the recipe's `data.cache` or in a folder that is deleted again.

    >>> from phasor import DataConfig, TrainConfig
    >>> data = DataConfig(train=__file__, tokenizer="bytes", sequence_length=24)
    >>> shown = preview(Recipe(data=data, train=TrainConfig(batch_tokens=96)), rows=1)
    >>> [run.trained for run in shown.rows[0][0].runs], shown.rows_of_step
    ([False, True], 4)
    """
    check_integer("rows", rows)
    check_integer("step", step, least=0)
    if split not in ("train", "valid"):
        raise ValueError(f"split must be 'train' or 'valid', not {split!r}")
    progress = TrainingProgress() if progress is None else progress
    with tempfile.TemporaryDirectory(prefix="phasor-preview-") as folder:
        prepared = prepare(recipe, Path(folder) / "data", progress.on_prepare, notify=progress.on_message)
        datasets = build_datasets(recipe, prepared)
        batches = datasets.train if split == "train" else datasets.valid
        batch = batches[step]
        counted = batch.tensors().get("trained", batch.weights)
        return Preview(
            step=step,
            rows=tuple(tuple(show_row(batch, row, recipe, datasets)) for row in range(min(rows, len(batch.tokens)))),
            rows_of_step=len(batch.tokens),
            tokens_of_step=batch.tokens.numel(),
            trained_of_step=int((counted > 0).sum()),
            steps_per_epoch=batches.per_epoch,
            train=datasets.sizes[0],
            valid=datasets.sizes[1],
            left_out=datasets.left_out,
            mixture=datasets.mixture,
        )


def show_row(batch: Batch, row: int, recipe: Recipe, datasets: Datasets) -> Iterator[ShownText]:
    """The texts of a row of a batch."""
    tokenizer, pad = datasets.tokenizer, datasets.special.pad
    tokens, targets, weights = batch.tokens[row], batch.targets[row], batch.weights[row]
    if batch.candidates is not None and batch.candidate_mask is not None and batch.attention_mask is not None:
        yield whole("anchor", tokenizer, tokens[batch.attention_mask[row]], False)
        for place, (candidate, real) in enumerate(zip(batch.candidates[row], batch.candidate_mask[row], strict=True)):
            if real.any():
                yield whole("negative" if place else "positive", tokenizer, candidate[real], not place)
    elif datasets.labels and batch.attention_mask is not None:
        yield from show_labels(batch, row, datasets)
    elif batch.source is not None and batch.source_attention_mask is not None:
        reader = datasets.source_tokenizer or tokenizer
        yield whole("source", reader, batch.source[row][batch.source_attention_mask[row]], False)
        yield show_predictions("target", tokenizer, tokens, targets, weights > 0, pad)
    else:
        yield from show_documents(batch, row, recipe, datasets)


def show_documents(batch: Batch, row: int, recipe: Recipe, datasets: Datasets) -> Iterator[ShownText]:
    """The documents of a row: what each predicts is the next token of it, or a token that is masked."""
    tokenizer, pad = datasets.tokenizer, datasets.special.pad
    tokens, targets = batch.tokens[row], batch.targets[row]
    trained = batch.tensors().get("trained", batch.weights)[row] > 0
    ids = torch.zeros_like(tokens) if batch.document_ids is None else batch.document_ids[row]
    for number, document in enumerate(torch.unique_consecutive(ids).tolist()):
        own = ids == document
        if not trained[own].any() and bool((tokens[own] == pad).all()):
            continue  # padding
        name = f"document {number + 1}"
        if recipe.task == "preference":
            name = f"pair {number // 2 + 1}, {('rejected' if number % 2 else 'chosen')}"
        if recipe.task == "mlm":
            shown = torch.where(trained[own], targets[own], tokens[own])
            yield text_of(name, tokenizer, shown.tolist(), trained[own].tolist())
        else:
            yield show_predictions(name, tokenizer, tokens[own], targets[own], trained[own], pad)


def show_labels(batch: Batch, row: int, datasets: Datasets) -> Iterator[ShownText]:
    """A text and its label, or the label of each of its words."""
    assert batch.attention_mask is not None
    tokens, real = batch.tokens[row], batch.attention_mask[row]
    targets, counted = batch.targets[row], batch.weights[row] > 0
    if targets.shape != tokens.shape:
        yield whole("text", datasets.tokenizer, tokens[real], False)
        for label in targets[counted].tolist():
            yield ShownText("label", 1, 1, (Run(datasets.labels[label], True),))
        return
    yield text_of("text", datasets.tokenizer, tokens[real].tolist(), counted[real].tolist())
    words = (datasets.labels[label] for label in targets[counted].tolist())
    yield ShownText("labels", int(counted.sum()), int(counted.sum()), (Run(" ".join(words), True),))


def whole(name: str, tokenizer: Any, tokens: Tensor, trained: bool) -> ShownText:
    """A text of which all tokens are trained, or none."""
    return text_of(name, tokenizer, tokens.tolist(), [trained] * len(tokens))


def show_predictions(
    name: str, tokenizer: Any, tokens: Tensor, targets: Tensor, trained: Tensor, pad: int
) -> ShownText:
    """A text of which each token predicts the next: what follows one that counts is trained."""
    real = (tokens != pad) | (targets != pad) | trained
    count = int(real.nonzero().max()) + 1 if bool(real.any()) else 0
    ids = [*tokens[:count].tolist(), *targets[max(0, count - 1) : count].tolist()]
    return text_of(name, tokenizer, ids, [False, *trained[:count].tolist()])


def text_of(name: str, tokenizer: Any, ids: list[int], trained: list[bool]) -> ShownText:
    """Tokens as runs of text; a letter of several tokens belongs to the run in which it ends."""
    ends = [i for i in range(1, len(ids)) if trained[i] != trained[i - 1]] + [len(ids)] * bool(ids)
    decode: Callable[[int], str] = lambda end: tokenizer.decode(ids[:end], skip_special_tokens=False)  # noqa: E731
    texts, before = [], ""
    for end in ends:
        text = decode(end)
        texts.append(Run(text[len(before) :], trained[end - 1]))
        before = text
    return ShownText(name, len(ids), sum(islice(trained, len(ids))), tuple(texts))
