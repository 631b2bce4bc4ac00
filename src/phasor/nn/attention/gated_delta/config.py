"""The configuration of gated delta attention."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.attention import AttentionConfig
from phasor.config.model import ModelConfig
from phasor.config.parts import RMSNormConfig
from phasor.config.recurrent import RecurrentAttentionConfig
from phasor.config.weights import Weight, Weights, linear, with_prefixes


class GatedDeltaAttentionConfig(RecurrentAttentionConfig, kind="gated-delta"):
    """Gated delta rule (Gated DeltaNet): a state per head, which decays and is corrected by every token.

    The result of each head is normalized and then gated. There are no positions: the order of tokens is in the state.

    >>> from phasor.config import ModelConfig
    >>> model = ModelConfig(vocab_size=9, dim=2048, num_layers=1, num_heads=16, attention="gated-delta")
    >>> model.attention.sizes(model)
    StateSizes(heads=16, key_heads=16, key=64, value=128)
    >>> model.cached_per_token(0), model.cached_per_sequence(0)["state"].shape
    ({}, (16, 64, 128))
    """

    is_delta: ClassVar[bool] = True
    products: ClassVar[int] = 3  # a state is read with the key too

    conv_width: int | None = 4

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """All but the norm is cut by key heads, with the heads that share them."""
        sizes = self.sizes(model)
        own = {
            "gates": linear(2 * sizes.heads, model.dim, cut=0),
            "norm": RMSNormConfig().weights(sizes.value),
        }
        by_head = dict.fromkeys(("A_log", "dt_bias"), Weight((sizes.heads,), 0))
        return super().weights(model, cross=cross) | by_head | with_prefixes(own)

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "gated-delta": cls(),
            "gated-delta-groups": cls(
                num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3, norm_eps=1e-2
            ),
            "gated-delta-biases": cls(conv_bias=True, bias=True),
        }
