"""The contract of a task's examples: how they are read, become tokens, and are put into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from phasor.config import ModelConfig
from phasor.config.recipe import Recipe
from phasor.config.schema import quote
from phasor.data.batch import Batch
from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens
from phasor.data.positions import GivenPositions
from phasor.data.split import Example, format_place
from phasor.data.token_files import TokenStore
from phasor.data.tokenizers import ENDS, SpecialIds


class ExampleBatches(Protocol):
    """Batches of a store by epoch and index; `longest` is the longest sequence in tokens."""

    per_epoch: int
    longest: int

    def make_batch(self, number: int, index: int) -> Batch: ...


class Examples:
    """The examples of a recipe's task; a subclass states how they differ from documents, and one method or another.

    `sides` arrays are stored for each, of which `token_sides` are counted as its tokens. `ends` is what a new
    tokenizer puts around a text, and `has_source` whether the first of two texts may have another tokenizer.
    `unrelated` are fields of `DataConfig` that the tokens do not depend on. In messages an example is a `unit`, and
    its length is `measured` in tokens.
    """

    sides: ClassVar[int] = 1
    token_sides: ClassVar[tuple[int, ...]] = (0,)
    ends: ClassVar[str] = ENDS
    has_source: ClassVar[bool] = False
    needs_mask: ClassVar[bool] = False
    unrelated: ClassVar[frozenset[str]] = frozenset({"share_vocabulary"})
    unit: ClassVar[str] = "example"
    measured: ClassVar[str] = "tokens"
    batch_source: ClassVar[Callable[..., ExampleBatches]]  # of a store, the recipe, a seed, special ids, if shuffled

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.skipped: Counter[str] = Counter()  # examples that are left out, by their reasons

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        """The examples of a source, each as texts; a mistake is a `ValueError` with its file and line."""
        raise NotImplementedError

    def texts(self, example: Example) -> tuple[str, ...]:
        """The texts that a new tokenizer learns from."""
        return example

    def adapt(self, tokenizers: Tokenizers, folder: Path | None) -> Tokenizers:
        """The tokenizers with what the task needs besides; they are new, or those of a folder."""
        return tokenizers

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterable[tuple[Any, ...]]:
        """The tokens of examples, an array for each side; `report` is told of characters that are encoded."""
        raise NotImplementedError

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        """The number of tokens that `data.sequence_length` limits; 0 where nothing does."""
        return max(map(len, tokens))

    def batches(
        self,
        store: TokenStore,
        seed: int,
        special: SpecialIds,
        *,
        shuffled: bool,
        positions: GivenPositions | None,
        vocab_size: int | None,
    ) -> ExampleBatches:
        """The batches of a store; `positions` and `vocab_size` are for documents."""
        return self.batch_source(store, self.recipe, seed, special, shuffled)

    def adopt(self, config: ModelConfig) -> None:
        """Take what a trained model fixes of its examples, such as the names of labels."""

    def summary(self) -> dict[str, Any]:
        """What a run has to know of its examples once all are encoded, as JSON."""
        return {}

    def origin(self) -> dict[str, Any]:
        """What the tokens depend on besides `DataConfig`, the files and the tokenizer, as JSON."""
        return {}

    def fit(self, example: Example, tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...] | None:
        """The tokens of an example that is short enough; None for a longer one, refused unless such are skipped."""
        length, data = self.length(tokens), self.recipe.data
        if length <= data.sequence_length:
            return tokens
        if data.too_long == "refuse":
            raise ValueError(
                f"{format_place(example)}a {self.unit} has {length} {self.measured}, and data.sequence_length is "
                f"{data.sequence_length} (data.too_long 'skip' leaves such {self.unit}s out): {quote(example[0])}"
            )
        self.skipped[f"with more than {data.sequence_length} {self.measured}"] += 1
        return None

    def left_out(self) -> list[str]:
        """The examples that are skipped, in words."""
        return [f"{count} {self.unit}s {reason}" for reason, count in sorted(self.skipped.items())]
