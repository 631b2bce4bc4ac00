"""Texts with a label, pairs of texts with a label, and words with a label each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from phasor.checkpoints.load import read_config
from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.config import ClassifierConfig, ModelConfig
from phasor.config.recipe import Recipe
from phasor.config.schema import name_some, quote
from phasor.data.columns import label_name, read_columns
from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens
from phasor.data.examples.base import Examples
from phasor.data.labeled import TOKENS, LabeledBatches
from phasor.data.split import Example, PlacedExample, format_place


class Labeled(Examples):
    """Tokens with the ends that the tokenizer gives them, which text of a pair each is of, and labels.

    An example is a text and its label, with a second text between the two in a pair; or words and their labels, both
    as JSON. The label of a word stands at its first token.
    """

    sides = 3
    ends = "<bos> $A <eos>"
    unrelated = frozenset({"share_vocabulary"})
    unit = "text"
    batch_source = LabeledBatches

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.config, self.of_words = recipe.classify, recipe.classify.of == "token"
        self.seen: set[str] = set()
        self.labels = self.config.labels

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        for example in self.read_words(path) if self.of_words else self.read_texts(path):
            self.seen.update(self.labels_of(example))
            yield example

    def read_texts(self, path: str | None) -> Iterator[Example]:
        data, config = self.recipe.data, self.config
        names = (data.field, config.label_field), (data.field, config.pair_field, config.label_field)
        for row in read_columns(path, data, names, "texts with labels"):
            texts = [row.text(name) for name in names[config.pair_field in row.values][:-1]]
            yield PlacedExample((*texts, row.label(config.label_field)), row.where)

    def read_words(self, path: str | None) -> Iterator[Example]:
        config = self.config
        for row in read_columns(path, self.recipe.data, (), "words with labels"):
            words, labels = row.list_of(config.words_field), row.list_of(config.labels_field)
            if len(words) != len(labels):
                raise ValueError(f"{row.where}: there are {len(words)} words and {len(labels)} labels")
            if wrong := [word for word in words if not isinstance(word, str) or not word.strip()]:
                raise ValueError(f"{row.where}: {quote(wrong[0])} is one of {config.words_field!r}, and not a word")
            names = [label_name(label, config.labels_field, row.where) for label in labels]
            yield PlacedExample([json.dumps(each, ensure_ascii=False) for each in (words, names)], row.where)

    def labels_of(self, example: Example) -> list[str]:
        """The names of an example's labels."""
        return json.loads(example[-1]) if self.of_words else [example[-1]]

    def texts(self, example: Example) -> tuple[str, ...]:
        return (" ".join(json.loads(example[0])),) if self.of_words else example[:-1]

    def adopt(self, config: ModelConfig) -> None:
        if isinstance(config.head, ClassifierConfig):
            self.labels = config.head.labels

    def summary(self) -> dict[str, Any]:
        return {"labels": list(self.all_labels())}

    def all_labels(self) -> tuple[str, ...]:
        """The names of all labels, in order: those that are given, or those that were read, sorted."""
        self.labels = self.labels or known_labels(self.recipe)
        if not self.labels:
            numeric = all(name.isdecimal() for name in self.seen)
            self.labels = tuple(sorted(self.seen, key=int if numeric else None))
        return self.labels

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterable[tuple[Any, ...]]:
        tokenizer = tokenizers.target
        tokenizer.encode_special_tokens = True  # the name of one, in a text, is text
        spaced = tokenizer.token_to_id("Ġ") is not None  # tokens of bytes tell by a space that a word begins
        given = [spaced_words(example[0], spaced) if self.of_words else text_or_pair(example) for example in examples]
        with tokenizer_errors("the tokenizer cannot encode the data"):
            encodings = tokenizer.encode_batch(given, is_pretokenized=self.of_words)
        for example, encoding in zip(examples, encodings, strict=True):
            numbers = [self.number(name, example) + 1 for name in self.labels_of(example)]
            labels = at_first_tokens(encoding.word_ids, numbers) if self.of_words else numbers
            if not any(labels):
                raise ValueError(f"{format_place(example)}no word has a token: {quote(example[0])}")
            report(sum(map(len, example)))
            yield tuple(np.array(side, np.uint32) for side in (encoding.ids, encoding.type_ids, labels))

    def number(self, name: str, example: Example) -> int:
        """The number of a label."""
        labels = self.all_labels()
        if name not in labels:
            raise ValueError(
                f"{format_place(example)}the label {name!r} is not one of the model's: {name_some(labels, 9)}"
            )
        return labels.index(name)

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        return len(tokens[TOKENS])

    def origin(self) -> dict[str, Any]:
        return {"classify": self.config.to_dict(), "labels": list(self.labels or known_labels(self.recipe))}


def known_labels(recipe: Recipe) -> tuple[str, ...]:
    """The labels of the model that is fine-tuned, where it has such a head."""
    head = None if recipe.init_from is None else read_config(recipe.init_from).head
    return head.labels if isinstance(head, ClassifierConfig) and head.kind == recipe.classify.head else ()


def text_or_pair(example: Example) -> str | tuple[str, str]:
    """The text of an example, or both of its texts."""
    return example[0] if len(example) == 2 else (example[0], example[1])


def spaced_words(words: str, spaced: bool) -> list[str]:
    """Words out of JSON, with a space before all but the first where they are `spaced`.

    >>> spaced_words('["New", "York"]', True)
    ['New', ' York']
    """
    first, *others = json.loads(words)
    return [first, *(f" {word}" if spaced else word for word in others)]


def at_first_tokens(words: Sequence[int | None], numbers: Sequence[int]) -> list[int]:
    """The number of each word at its first token; 0 at others.

    >>> at_first_tokens([None, 0, 0, 1, None], [5, 7])
    [0, 5, 0, 7, 0]
    """
    before = [None, *words]
    return [0 if word is None or word == last else numbers[word] for word, last in zip(words, before, strict=False)]
