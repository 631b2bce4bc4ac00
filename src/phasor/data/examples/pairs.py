"""Pairs: a source and its target, for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens, add_ends, encode_texts
from phasor.data.examples.base import Examples
from phasor.data.pairs import Pairs
from phasor.data.sources import pairs
from phasor.data.split import Example


class ParallelTexts(Examples):
    """A source as its tokenizer ends texts, and a target that begins with the token a decoder starts from."""

    sides = 2
    token_sides = (0, 1)
    ends = "$A <eos>"
    has_source = True
    unrelated = frozenset()
    unit = "pair"
    measured = "tokens on a side"
    batch_source = Pairs

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        return pairs(path, self.recipe.data, target, split)

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterable[tuple[Any, ...]]:
        special = tokenizers.special
        sources = encode_texts((source for source, _ in examples), tokenizers.source, True, special, report)
        targets = encode_texts((target for _, target in examples), tokenizers.target, True, special, report)
        return zip(sources, (add_ends([special.start], ids, special.eos) for ids in targets), strict=True)

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        return max(len(tokens[0]), len(tokens[1]) - 1)  # a decoder reads its target without the last token
