"""A row of the engine: one continuation of a request, and what the cache holds of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phasor.generation.request import SequenceState
from phasor.kv_cache.paged import PagedRow

if TYPE_CHECKING:
    from phasor.generation.engine.graph_steps import LaunchedStep
    from phasor.generation.engine.handle import Handle


@dataclass(eq=False)
class EngineRow:
    """One of the continuations of a request; `followers` are further ones that begin with the same prompt.

    `text` is the prompt of the decoder with all new tokens. `cached` is None while the row waits; `passed_by` counts
    later ones that began before it.
    """

    handle: Handle
    index: int
    state: SequenceState
    text: list[int] = field(init=False)
    most_new: int | None = field(init=False)
    cached: PagedRow | None = None
    followers: list[EngineRow] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)  # the likeliest tokens in the place of each new one
    ended: bool = False
    passed_by: int = 0
    launched: tuple[LaunchedStep, int] | None = None  # the step that computes its next token, and its place there

    def __post_init__(self) -> None:
        self.text = list(self.state.prompt)
        self.most_new = self.handle.request.options.max_new_tokens

    @property
    def count(self) -> int:
        """The tokens that the cache holds."""
        return 0 if self.cached is None else self.cached.count

    @property
    def pending(self) -> int:
        """The tokens to be read before the next one can be chosen."""
        count = 0 if self.cached is None else self.cached.count
        return len(self.text) + (self.launched is not None) - count

    @property
    def computes_last(self) -> bool:
        """Whether a step computes its last token."""
        return len(self.state.new) + (self.launched is not None) == self.most_new

    @property
    def needs_source(self) -> bool:
        """Whether the encoder has not read its prompt."""
        if self.cached is None or not self.handle.request.is_encoder_decoder:
            return False
        return self.cached.source_length == 0
