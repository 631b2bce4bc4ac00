"""Documents: texts that are packed end to end into rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens, add_ends, encode_texts
from phasor.data.examples.base import Examples
from phasor.data.positions import GivenPositions
from phasor.data.rows import Rows
from phasor.data.sources import documents
from phasor.data.split import Example
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import SpecialIds


class Documents(Examples):
    """Texts between `bos` and `eos`, whose tokens predict the next one."""

    unrelated = frozenset({"sequence_length", "too_long", "share_vocabulary"})
    unit = "document"

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        return ((text,) for text in documents(path, self.recipe.data))

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterable[tuple[Any, ...]]:
        special = tokenizers.special
        first = [] if special.bos is None else [special.bos]
        texts = encode_texts((text for (text,) in examples), tokenizers.target, False, special, report)
        return ((add_ends(first, ids, special.eos),) for ids in texts)

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        return 0  # rows cut documents

    def batches(
        self,
        store: TokenStore,
        seed: int,
        special: SpecialIds,
        *,
        shuffled: bool,
        positions: GivenPositions | None,
        vocab_size: int | None,
    ) -> Rows:
        if self.needs_mask and (vocab_size is None or special.mask is None):
            raise ValueError("masking needs a vocabulary's size and its mask token")
        masked = vocab_size if self.needs_mask else None
        return Rows(store, self.recipe, seed, special, shuffled, positions, masked)


class MaskedDocuments(Documents):
    """Texts some of whose tokens are masked and predicted."""

    ends = "<bos> $A <eos>"
    needs_mask = True
