"""The configuration of a layer without attention."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.weights import Weights


class NoAttentionConfig(AttentionConfig, kind="none"):
    """No attention: the layer is a feed-forward network alone, with one norm and one residual sum.

    What it keeps of a sequence has a constant size, which is 0.

    >>> from phasor.config import ModelConfig
    >>> mixer, network = {"feedforward": {"hidden_dim": 0}}, {"attention": "none"}
    >>> model = ModelConfig(vocab_size=9, dim=8, num_layers=4, num_heads=1, layers=(mixer, network))
    >>> [(layer.attention.present, layer.feedforward.present) for layer in map(model.layer, range(4))]
    [(True, False), (False, True), (True, False), (False, True)]
    """

    present: ClassVar[bool] = False
    takes_positions: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {}

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        return {}

    def heads_to_cut(self, model: ModelConfig) -> tuple[int, str]:
        return 0, "heads"

    def query_width(self, model: ModelConfig) -> int:
        return 0

    def output_width(self, model: ModelConfig) -> int:
        return 0

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """None: there is nothing that the contract of attention asks for."""
        return {}
