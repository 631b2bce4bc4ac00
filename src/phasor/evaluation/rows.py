"""The rows of an evaluation over lengths: documents as tokens, those that are long enough, cut into rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.runs import is_run
from phasor.config.recipe import DataConfig
from phasor.config.text_files import path_of
from phasor.data.encoding import Tokens, encode_texts
from phasor.data.sources import documents
from phasor.data.tokenizers import SpecialIds
from phasor.evaluation.run import TrainedRun, open_run
from phasor.evaluation.token_source import TOKEN_FILES, open_tokens
from phasor.generation.encode import without_limits
from phasor.transformer import Transformer

MANY_DOCUMENTS = 10  # with at least as many, intervals are over documents, and else over rows
CHUNK = 1 << 20  # tokens of a file that are read at a time


@dataclass(frozen=True)
class LongRows:
    """Documents of whole rows of `length` targets; `found` is how many documents there were, long enough or not."""

    documents: Sequence[Tokens]
    length: int
    found: int
    longest: int

    @property
    def counts(self) -> list[int]:
        """The rows of each document."""
        return [(len(document) - 1) // self.length for document in self.documents]

    @property
    def unit(self) -> str:
        """What intervals are taken over: documents, or rows where there are few documents."""
        return "document" if len(self.documents) >= MANY_DOCUMENTS else "row"

    def by_unit(self, values: NDArray[np.float64]) -> list[float]:
        """The means of values, one per row in order, over each unit."""
        if self.unit == "row":
            return values.tolist()
        starts = np.cumsum([0, *self.counts[:-1]])
        return (np.add.reduceat(values, starts) / np.array(self.counts)).tolist()

    @property
    def weights(self) -> list[float]:
        """The rows of each unit."""
        return [1.0] * sum(self.counts) if self.unit == "row" else [float(count) for count in self.counts]


def cut_rows(texts: Iterable[Tokens], length: int, limit: int | None, join: bool, where: str) -> LongRows:
    """Documents cut to whole rows of `length` targets, the first `limit` rows of all; refused where there is none.

    >>> rows = cut_rows([np.arange(9), np.arange(3), np.arange(7)], 4, None, False, "the data")
    >>> rows.counts, [len(document) for document in rows.documents], rows.found
    ([2, 1], [9, 5], 3)
    """
    every = list(texts)
    if join and every:
        every = [np.concatenate(every)]
    kept: list[Tokens] = []
    left = limit
    for document in every:
        rows = (len(document) - 1) // length if left is None else min((len(document) - 1) // length, left)
        if rows > 0:
            kept.append(document[: rows * length + 1])
            left = None if left is None else left - rows
    if not every:
        raise ValueError(f"there is no text in {where} to evaluate on")
    longest = max(map(len, every))
    if not kept:
        number = "the document" if len(every) == 1 else f"none of the {len(every):,} documents"
        has = "has fewer" if len(every) == 1 else "has that many"
        raise ValueError(
            f"a length of {length:,} needs documents of {length + 1:,} tokens, and {number} in {where} {has}: the "
            f"longest has {longest:,}; give shorter lengths, longer documents, or --join to read all of them as one"
        )
    return LongRows(kept, length, len(every), longest)


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that is evaluated, where it is from, and the tokens that texts begin and end with, if it has such."""

    model: Transformer
    name: str
    bos: int | None
    eos: int | None
    run: TrainedRun | None = None


def open_evaluated_model(
    model: str | Path | Transformer, device: str, checkpoint: str | int | None, part: str | None
) -> EvaluatedModel:
    """The model of a run folder or of any folder that `phasor.load` reads, or a model that is loaded already."""
    if not isinstance(model, Transformer) and is_run(path_of(model)):
        run = open_run(path_of(model), device, checkpoint, part=part)
        return EvaluatedModel(run.model, str(model), run.special.bos, run.special.eos, run)
    opened, folder = open_model(model, device, checkpoint=checkpoint, part=part)
    name = "a model in memory" if folder is None else str(model)
    return EvaluatedModel(opened, name, opened.special.bos, next(iter(opened.special.stop), None))


def read_documents(evaluated: EvaluatedModel, data: str | Path | None) -> tuple[Iterable[Tokens], str]:
    """The documents to evaluate on as tokens, and how messages name where they are from.

    A token file is one document. Texts are documents as training reads them: a text file is one, a line of JSON is one.
    """
    run = evaluated.run

    def encode(texts: Iterable[str]) -> Iterator[Tokens]:
        tokenizer = evaluated.model.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"{evaluated.name} has no tokenizer, so --data must be a token file: {', '.join(TOKEN_FILES)}"
            )
        return encode_documents(tokenizer, evaluated.bos, evaluated.eos, texts)

    if data is None:
        if run is None:
            raise ValueError(f"{evaluated.name} is no run with validation data: give --data to evaluate on")
        return encode(text for (text,) in run.valid_texts()), "the validation data"
    path = path_of(data, "the data")
    if path.suffix in TOKEN_FILES:
        with closing(open_tokens(path, evaluated.model)) as source:
            parts = [chunk.astype(np.uint32) for chunk in source.chunks(CHUNK)]
        return [np.concatenate([np.zeros(0, np.uint32), *parts])], str(path)
    config = DataConfig(format="auto") if run is None or run.recipe.data.generates_data else run.recipe.data
    return encode(documents(str(path), config)), str(path)


def encode_documents(tokenizer: Tokenizer, bos: int | None, eos: int | None, texts: Iterable[str]) -> Iterator[Tokens]:
    """The tokens of documents between `bos` and `eos`, where there are such."""
    tokenizer = without_limits(tokenizer)
    first, last = (np.array([] if token is None else [token], np.uint32) for token in (bos, eos))
    for text in texts:
        (ids,) = encode_texts([text], tokenizer, False, SpecialIds())
        yield np.concatenate([first, ids, last])
