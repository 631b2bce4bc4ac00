"""The configuration of gated delta attention."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.parts import RMSNormConfig
from phasor.config.schema import MOST_FEATURES, MOST_HEAD_DIM, positive
from phasor.config.weights import Weight, Weights, linear, with_prefixes

CHUNK = 64  # tokens for which the backward pass keeps one state


class DeltaSizes(NamedTuple):
    """Numbers of heads with a state, and with queries and keys, and the widths of a head's key and of its value."""

    heads: int
    key_heads: int
    key: int
    value: int

    @property
    def channels(self) -> int:
        """Features of the queries, keys and values of all heads, which the convolution takes."""
        return 2 * self.key_heads * self.key + self.heads * self.value


class GatedDeltaAttentionConfig(AttentionConfig, kind="gated-delta"):
    """Gated delta rule (Gated DeltaNet): a state per head, which decays and is corrected by every token.

    Queries, keys and values pass a causal convolution over the last `conv_width` tokens. What a head keeps is a matrix
    `key_dim` x `value_dim`, for any number of tokens. Of `num_heads` heads several in a row share the queries and
    keys of one of `num_key_heads`. Left out, the heads are those of the model, values are as wide as its heads and keys
    half as wide, which together are about as many weights as softmax attention has. The result of each head is
    normalized, with `norm_eps`, and gated. There are no positions: the order of tokens is in the state.

    >>> from phasor.config import ModelConfig
    >>> model = ModelConfig(vocab_size=9, dim=2048, num_layers=1, num_heads=16, attention="gated-delta")
    >>> model.attention.sizes(model)
    DeltaSizes(heads=16, key_heads=16, key=64, value=128)
    >>> model.cached_per_token(0), model.cached_per_sequence(0)["state"].shape
    ({}, (16, 64, 128))
    """

    takes_positions: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

    num_heads: int | None = None
    num_key_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    conv_width: int = 4
    norm_eps: float = 1e-6

    def check(self) -> None:
        positive(self, "num_heads", "num_key_heads", most=MOST_FEATURES)
        positive(self, "key_dim", "value_dim", "conv_width", most=MOST_HEAD_DIM)
        positive(self, "norm_eps")

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        if model.shape != "decoder":
            raise ValueError(f"{self.kind} attention is for decoders, and this is an {model.shape}")
        sizes = self.sizes(model)
        if sizes.heads % sizes.key_heads:
            raise ValueError(
                f"GatedDeltaAttentionConfig.num_heads ({sizes.heads}) is not divisible by num_key_heads "
                f"({sizes.key_heads})"
            )

    def sizes(self, model: ModelConfig) -> DeltaSizes:
        """Numbers and widths of heads."""
        heads = model.num_heads if self.num_heads is None else self.num_heads
        key = max(1, model.head_dim // 2) if self.key_dim is None else self.key_dim
        value = model.head_dim if self.value_dim is None else self.value_dim
        return DeltaSizes(heads, heads if self.num_key_heads is None else self.num_key_heads, key, value)

    def resolve(self, model: ModelConfig) -> Self:
        heads, key_heads, key, value = self.sizes(model)
        return self.replace(num_heads=heads, num_key_heads=key_heads, key_dim=key, value_dim=value)

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {}

    def cached_per_sequence(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """The state of every head, and the last inputs of the convolution."""
        sizes = self.sizes(model)
        return {
            "state": CachedTensor((sizes.heads, sizes.key, sizes.value), "float32"),
            "inputs": CachedTensor((self.conv_width - 1, sizes.channels)),
        }

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """All but the norm is cut by key heads, with the heads that share them."""
        sizes, rows = self.sizes(model), self.output_width(model)
        projections = {
            "qkvz": linear(sizes.channels + rows, model.dim, cut=0),
            "gates": linear(2 * sizes.heads, model.dim, cut=0),
            "norm": RMSNormConfig().weights(sizes.value),
            "out": linear(model.dim, rows, cut=1),
        }
        by_head = dict.fromkeys(("A_log", "dt_bias"), Weight((sizes.heads,), 0))
        return {"convolution": Weight((sizes.channels, self.conv_width), 0)} | by_head | with_prefixes(projections)

    def heads_to_cut(self, model: ModelConfig) -> tuple[int, str]:
        return self.sizes(model).key_heads, "key heads"

    def query_width(self, model: ModelConfig) -> int:
        sizes = self.sizes(model)
        return sizes.key_heads * sizes.key

    def output_width(self, model: ModelConfig) -> int:
        sizes = self.sizes(model)
        return sizes.heads * sizes.value

    def kv_width(self, model: ModelConfig) -> int:
        return self.query_width(model) + self.output_width(model)

    def flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """A state is read with the key, written, and read with the query, after any number of tokens."""
        sizes = self.sizes(model)
        return 6 * sizes.heads * sizes.key * sizes.value + 2 * self.conv_width * sizes.channels

    def saved_elements(self, model: ModelConfig) -> int:
        """The inputs of the convolution, of the norm and its gates too, and a state for some tokens in a row."""
        sizes = self.sizes(model)
        states = 2 * sizes.heads * sizes.key * sizes.value // CHUNK  # in float32
        return super().saved_elements(model) + sizes.channels + 2 * self.output_width(model) + states

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "gated-delta": cls(),
            "gated-delta-groups": cls(
                num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3, norm_eps=1e-2
            ),
        }
