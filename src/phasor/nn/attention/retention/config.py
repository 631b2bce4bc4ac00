"""The configuration of retention."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.attention import AttentionConfig
from phasor.config.model import ModelConfig
from phasor.config.parts import LayerNormConfig
from phasor.config.recurrent import RecurrentAttentionConfig
from phasor.config.weights import Weights, with_prefixes


class RetentionAttentionConfig(RecurrentAttentionConfig, kind="retention"):
    """Retention (RetNet): a state per head, which decays by the same factor at every token.

    Head `h`, counted from 0, keeps `1 - 2^(-5 - h)` of its state. The result of each head is normalized (group norm)
    and then gated. Positions rotate queries and keys, as those of RetNet are; there may be none.

    >>> from phasor.config import ModelConfig
    >>> sizes = dict(vocab_size=9, dim=2048, num_layers=1, num_heads=16, position="rotary")
    >>> model = ModelConfig(**sizes, attention="retention")
    >>> model.attention.sizes(model), model.attention.head_dim_of(model)
    (StateSizes(heads=16, key_heads=16, key=64, value=128), 64)
    """

    takes_positions: ClassVar[bool] = True

    norm_eps: float = 1e-5

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        layers = (model.layer(index) for index in range(max(1, len(model.layers))))
        for position in (part for layer in layers if layer.attention == self for part in layer.position.parts):
            if not position.takes_latent_keys or set(position.acts_on) - {"queries", "keys"}:
                raise ValueError(
                    "retention takes positions that rotate queries and keys, each by its own alone, and not "
                    f"{position.kind!r}"
                )

    def head_dim_of(self, model: ModelConfig) -> int:
        return self.sizes(model).key

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        sizes = self.sizes(model)
        norm = {"norm": LayerNormConfig().weights(sizes.heads, sizes.value, cut=0)}
        return super().weights(model, cross=cross) | with_prefixes(norm)

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "retention": cls(),
            "retention-groups": cls(num_heads=6, num_key_heads=2, key_dim=6, value_dim=7, conv_width=3, bias=True),
        }
