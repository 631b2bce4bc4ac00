"""What a step runner does, and what it is built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.static_paged import StaticPagedKVCache
from phasor.transformer import Transformer

ENDLESS = 1 << 62  # the length of a cache whose layers all have windows
LENGTH_MULTIPLE = 128  # caches of compiled steps are rounded up to this, so that similar lengths share a graph


class StepRunner(Protocol):
    """Runs a decoder from a cache: first the prompts, then one token per row and step.

    `has_fixed_rows` says whether it keeps all of its rows until the end, or drops those that `reorder` leaves out.
    """

    has_fixed_rows: bool

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        memory: EncoderOutput | None = None,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Read the prompts of all rows, at positions that may be given; the logits `[B, vocab]` after them."""
        ...

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Feed one token per row; the logits `[B, vocab]` after it, valid until the next step."""
        ...

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Let row `i` continue from what row `rows[i]` holds, another beam of the same search, in the next step."""
        ...


@dataclass(frozen=True)
class StepSpec:
    """What a step runner is chosen and built for: a model, and the size of its cache.

    `lengths` are the planned lengths of the rows, `max_length` unless given. `beams` rows each belong to one beam
    search, and `source_length` is that of the longest source of an encoder-decoder. `compile` asks for compiled steps.
    `like` is a tensor on the device of the steps where a model without storage stands in for one that is there. `pages`
    is the cache of steps over rows of a paged cache, which another cache has read the prompts of.
    """

    model: Transformer
    rows: int = 1
    max_length: int = LENGTH_MULTIPLE
    lengths: Sequence[int] | None = None
    compile: bool = False
    beams: int = 1
    source_length: int = LENGTH_MULTIPLE
    like: Tensor | None = field(default=None, compare=False)
    pages: StaticPagedKVCache | None = field(default=None, compare=False)

    @property
    def weight(self) -> Tensor:
        """A weight as it is when steps run."""
        return self.model.tokens.weight if self.like is None else self.like

    def new_cache(self) -> KVCache:
        return self.model.new_cache(self.rows, self.max_length, length=self.lengths)


def round_up(count: int) -> int:
    """A count rounded up to one of four sizes per power of two, so that similar counts share a graph.

    >>> [round_up(n) for n in (1, 7, 8, 9, 33, 65, 129)]
    [1, 7, 8, 10, 40, 80, 160]
    """
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def round_length(length: int) -> int:
    """A cache length rounded up to a multiple of `LENGTH_MULTIPLE`.

    >>> round_length(1), round_length(128), round_length(129)
    (128, 128, 256)
    """
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
