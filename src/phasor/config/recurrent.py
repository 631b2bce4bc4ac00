"""What kinds of attention with a state share, configuration side: their sizes, weights, caches and costs."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.schema import MOST_FEATURES, MOST_HEAD_DIM, positive
from phasor.config.weights import Weight, Weights, linear, with_prefixes

DELTA_CHUNK, RETENTION_CHUNK = 64, 128  # tokens; the delta rule solves a system in each chunk
# Tiles of long chunks with more features of a key, or in float32, do not fit into shared memory.
MAX_KEY_DIM_LONG_CHUNK, LONG_CHUNK_DTYPES = 128, ("bfloat16",)


def chunk_length(key_dim: int, dtype: str = "bfloat16", *, is_delta: bool) -> int:
    """The tokens that kernels compute by matrix products, and for which the backward pass keeps one state.

    >>> chunk_length(128, is_delta=False), chunk_length(256, is_delta=False), chunk_length(128, is_delta=True)
    (128, 64, 64)
    """
    fits = dtype in LONG_CHUNK_DTYPES and key_dim <= MAX_KEY_DIM_LONG_CHUNK
    return RETENTION_CHUNK if fits and not is_delta else DELTA_CHUNK


class StateSizes(NamedTuple):
    """Numbers of heads with a state, and with queries and keys, and the widths of a head's key and of its value."""

    heads: int
    key_heads: int
    key: int
    value: int

    @property
    def channels(self) -> int:
        """Features of the queries, keys and values of all heads, which the convolution takes."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def state(self) -> int:
        """Elements of the states of all heads."""
        return self.heads * self.key * self.value


class RecurrentAttentionConfig(AttentionConfig):
    """Attention whose heads keep a matrix `key_dim` x `value_dim` each, for any number of tokens.

    Of `num_heads` heads several in a row share the queries and keys of one of `num_key_heads`. Left out, the heads are
    those of the model, values are as wide as its heads and keys half as wide, which together are about as many weights
    as softmax attention has. With `conv_width` queries, keys and values pass a causal convolution over that many
    tokens, with `conv_bias` it has a bias. `bias` adds one to the projections. The result is normalized, with
    `norm_eps`, and gated.
    """

    takes_positions: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    is_delta: ClassVar[bool] = False  # whether a token corrects what its key finds in the state
    products: ClassVar[int] = 2  # of a state with a vector per token: it is written and read
    gates_per_head: ClassVar[int] = 0  # that are projected beside queries, keys, values and the gates of results

    num_heads: int | None = None
    num_key_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    conv_width: int | None = None
    conv_bias: bool = False
    bias: bool = False
    norm_eps: float = 1e-6

    def check(self) -> None:
        positive(self, "num_heads", "num_key_heads", most=MOST_FEATURES)
        positive(self, "key_dim", "value_dim", "conv_width", most=MOST_HEAD_DIM)
        positive(self, "norm_eps")
        if self.conv_bias and self.conv_width is None:
            raise ValueError(f"{type(self).__name__}.conv_bias needs conv_width: there is no convolution")

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        if model.shape != "decoder":
            raise ValueError(f"{self.kind} attention is for decoders, and this is an {model.shape}")
        sizes = self.sizes(model)
        if sizes.heads % sizes.key_heads:
            raise ValueError(
                f"{type(self).__name__}.num_heads ({sizes.heads}) is not divisible by num_key_heads ({sizes.key_heads})"
            )

    def sizes(self, model: ModelConfig) -> StateSizes:
        """Numbers and widths of heads."""
        heads = model.num_heads if self.num_heads is None else self.num_heads
        key = max(1, model.head_dim // 2) if self.key_dim is None else self.key_dim
        value = model.head_dim if self.value_dim is None else self.value_dim
        return StateSizes(heads, heads if self.num_key_heads is None else self.num_key_heads, key, value)

    def resolve(self, model: ModelConfig) -> Self:
        heads, key_heads, key, value = self.sizes(model)
        return self.replace(num_heads=heads, num_key_heads=key_heads, key_dim=key, value_dim=value)

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {}

    def gathered_elements(self, model: ModelConfig, tensor: int = 1) -> int:
        """The inputs of the convolution; states are few."""
        return 0 if self.conv_width is None else self.sizes(model).channels // tensor

    def cached_per_sequence(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """The state of every head, and the last inputs of the convolution."""
        sizes = self.sizes(model)
        kept = {"state": CachedTensor((sizes.heads, sizes.key, sizes.value), "float32")}
        if self.conv_width is not None:
            kept["inputs"] = CachedTensor((self.conv_width - 1, sizes.channels))
        return kept

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """What all kinds have, cut by key heads with the heads that share them."""
        sizes = self.sizes(model)
        found = {}
        if self.conv_width is not None:
            found["convolution"] = Weight((sizes.channels, self.conv_width), 0)
        if self.conv_bias:
            found["convolution_bias"] = Weight((sizes.channels,), 0)
        projections = {
            "qkvz": linear(self.projected_width(model), model.dim, bias=self.bias, cut=0),
            "out": linear(model.dim, self.output_width(model), bias=self.bias, cut=1),
        }
        return found | with_prefixes(projections)

    def projected_width(self, model: ModelConfig) -> int:
        """Rows of the projection of the input: queries, keys and values, gates of results, and other gates."""
        sizes = self.sizes(model)
        return sizes.channels + self.output_width(model) + self.gates_per_head * sizes.heads

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
        """Products with the state and in the convolution, the same after any number of tokens."""
        sizes = self.sizes(model)
        return 2 * self.products * sizes.state + 2 * (self.conv_width or 0) * sizes.channels

    def saved_elements(self, model: ModelConfig) -> int:
        """The inputs of the convolution, of the norm and its gates too, and what kernels keep."""
        convolved = 0 if self.conv_width is None else self.sizes(model).channels
        return super().saved_elements(model) + convolved + 2 * self.output_width(model) + self.kept_by_kernels(model)

    def kept_by_kernels(self, model: ModelConfig) -> int:
        """Elements per token that kernels keep in bfloat16: a state per chunk, and of the delta rule more.

        That are the inverse of each chunk's system, and what tokens wrote.
        """
        sizes = self.sizes(model)
        chunk = chunk_length(sizes.key, is_delta=self.is_delta)
        return sizes.state // chunk + (sizes.heads * (chunk + sizes.value) if self.is_delta else 0)
