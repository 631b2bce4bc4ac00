"""Prompts of exact token counts: a haystack with needles at a depth, and a question at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phasor.checkpoints.sentencepiece import resolve_unknown
from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.evaluation.retrieval.tasks import RetrievalSample, RetrievalTask
from phasor.evaluation.token_source import first_tokens, open_tokens
from phasor.generation.encode import without_limits
from phasor.transformer import Transformer

Ids = NDArray[np.int64]
BEFORE = "."  # what pieces of a prompt are encoded behind, so that none of them is the beginning of a text
ENDS = (".", "!", "?", "\n")  # of sentences
SEARCHED = 20  # a needle goes behind a sentence that ends in so small a part of the haystack before its depth
REPEATS = 16  # of a filler that are encoded together
READ = 4  # times the longest haystack that are read of a file, for haystacks that differ


@dataclass(frozen=True)
class PromptPieces:
    """The tokens of a sample, and how many of them are haystack where all of them are `length`."""

    intro: Ids
    needles: tuple[Ids, ...]
    question: Ids
    answer: Ids
    depths: tuple[float, ...]  # of the needles
    length: int

    @property
    def needle_tokens(self) -> int:
        """The tokens of all needles."""
        return sum(map(len, self.needles))

    @property
    def haystack_tokens(self) -> int:
        """What is left for the haystack; below 0 where the rest alone does not fit."""
        return self.length - len(self.intro) - self.needle_tokens - len(self.question) - len(self.answer)


class PromptBuilder:
    """Builds the prompts of a model.

    A prompt is made of tokens, not of text: intro, haystack, needles and question are encoded by themselves and joined,
    so that prompt and answer together have exactly the tokens that were asked for.

    >>> from phasor import preset
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> from phasor.evaluation.retrieval.tasks import TASKS
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=261))
    >>> model.tokenizer = byte_tokenizer()
    >>> builder = PromptBuilder(model)
    >>> pieces = builder.encode(TASKS["passkey"], 400, 0.5, random.Random(0))
    >>> prompt, answer = builder.join(TASKS["passkey"], pieces, random.Random(0))
    >>> len(prompt) + len(answer), model.tokenizer.decode(prompt[-25:].tolist() + answer.tolist())
    (400, 'pass key? The pass key is 60494')
    """

    def __init__(self, model: Transformer, haystack: str | Path | None = None, longest: int = 0) -> None:
        if model.tokenizer is None:
            raise ValueError("the model has no tokenizer, and prompts are made of text")
        self.tokenizer: Tokenizer = without_limits(model.tokenizer)
        self.first = np.array(first_tokens(self.tokenizer), np.int64)
        self.path = haystack
        self.texts: Ids | None = None
        if haystack is not None:
            with closing(open_tokens(haystack, model)) as source:
                self.texts = source.read(0, READ * longest)
        self.fillers: dict[str, Ids] = {}
        self.ends_sentence: dict[int, bool] = {}

    def encode(self, task: RetrievalTask, length: int, depth: float, draw: random.Random) -> PromptPieces:
        """Draw a sample and encode it; ValueError where it does not fit into `length` tokens, never a shorter one."""
        sample = task.draw(draw)
        question, answer = self._encode(sample.question, sample.answer)
        intro = np.concatenate([self.first, self._encode_start(sample.intro)])
        pieces = PromptPieces(
            intro,
            tuple(self._encode(needle)[0] for needle in sample.needles),
            question,
            answer,
            tuple(depths(sample, depth, draw)),
            length,
        )
        self._check(task, pieces)
        return pieces

    def join(self, task: RetrievalTask, pieces: PromptPieces, draw: random.Random) -> tuple[Ids, Ids]:
        """The tokens of a prompt and of its answer."""
        haystack = self._haystack(task, pieces.haystack_tokens, draw)
        places = [self._place(haystack, depth) for depth in pieces.depths]
        parts, last = [pieces.intro], 0
        for place, needle in sorted(zip(places, pieces.needles, strict=True), key=lambda pair: pair[0]):
            parts += [haystack[last:place], needle]
            last = place
        return np.concatenate([*parts, haystack[last:], pieces.question]), pieces.answer

    def _check(self, task: RetrievalTask, pieces: PromptPieces) -> None:
        left, needles = pieces.haystack_tokens, pieces.needle_tokens
        if left < needles:
            what = "no room" if left <= 0 else f"{left:,} tokens"
            raise ValueError(
                f"a prompt of {pieces.length:,} tokens for {task.name!r} has {what} for the haystack, and its needle "
                f"has {needles:,} tokens: a haystack is at least as long as its needle, from a length of "
                f"{pieces.length - left + needles:,} on"
            )
        if self.texts is not None and len(self.texts) < left:
            raise ValueError(
                f"{self.path} has {len(self.texts):,} tokens, and a prompt of {pieces.length:,} tokens for "
                f"{task.name!r} needs {left:,} for its haystack"
            )

    def _haystack(self, task: RetrievalTask, count: int, draw: random.Random) -> Ids:
        if self.texts is not None:
            start = draw.randrange(len(self.texts) - count + 1)
            return self.texts[start : start + count]
        if task.filler not in self.fillers:
            self.fillers[task.filler] = self._encode(task.filler * REPEATS)[0]
        filler = self.fillers[task.filler]
        return np.tile(filler, -(-count // len(filler)))[:count]

    def _place(self, haystack: Ids, depth: float) -> int:
        """The index of the haystack that a needle goes to: by its depth, or where a sentence ends shortly before."""
        place = round(depth * len(haystack))
        if place == len(haystack):
            return place
        for back in range(min(place, len(haystack) // SEARCHED)):
            if self._ends_sentence(int(haystack[place - back - 1])):
                return place - back
        return place

    def _ends_sentence(self, token: int) -> bool:
        if token not in self.ends_sentence:
            self.ends_sentence[token] = self.tokenizer.decode([token]).endswith(ENDS)
        return self.ends_sentence[token]

    def _encode_start(self, text: str) -> Ids:
        return self._ids(text)[0]

    def _encode(self, *texts: str) -> list[Ids]:
        """The tokens of texts that follow each other within a prompt, each by itself."""
        ids, ends = self._ids(BEFORE + "".join(texts))
        bounds = len(BEFORE) + np.cumsum([0, *map(len, texts)])
        return [ids[(ends > low) & (ends <= high)] for low, high in pairwise(bounds)]

    def _ids(self, text: str) -> tuple[Ids, Ids]:
        """Tokens, and the number of characters up to the end of each."""
        with tokenizer_errors("the tokenizer cannot encode a prompt"):
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = resolve_unknown(self.tokenizer, encoding.ids, encoding.tokens)
        return np.array(ids, np.int64), np.array([end for _, end in encoding.offsets], np.int64)


def depths(sample: RetrievalSample, depth: float, draw: random.Random) -> Sequence[float]:
    """Where the needles of a sample go: the first at `depth`.

    >>> sample = RetrievalSample("", ("a", "b", "c", "d"), "", "", others="after")
    >>> depths(sample, 0.2, random.Random(0))
    [0.2, 0.4, 0.6, 0.8]
    """
    count = len(sample.needles)
    if sample.others == "after":
        return [round(depth + (1 - depth) * i / count, 6) for i in range(count)]
    return [depth, *(draw.random() for _ in range(count - 1))]
