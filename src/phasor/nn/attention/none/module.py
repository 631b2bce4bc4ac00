"""The module of a layer without attention: it has no weights, and its block does not call it."""

from __future__ import annotations

from phasor.config import ModelConfig
from phasor.nn.attention.base import Attention
from phasor.nn.attention.none.config import NoAttentionConfig


class NoAttention(Attention, config=NoAttentionConfig):
    """A place that is empty."""

    def __init__(self, config: NoAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()

    def keep_part(self, index: int, count: int) -> None:
        """There are no heads."""
