"""The contract of attention, configuration side: what a kind says about itself, and what a model asks of it.

The kinds are folders of `phasor.nn.attention`, each with its `config.py` and its `module.py`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar, Self

from phasor.config.cached import CachedTensor
from phasor.config.schema import Choice
from phasor.config.sparse import SparseConfig
from phasor.config.weights import Weights

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class AttentionConfig(Choice, what="attention", default="softmax"):
    """How the tokens of a layer attend to each other; the number of heads is a field of ModelConfig.

    `cross` of its methods is for cross-attention, whose keys and values come from an encoder.
    """

    present: ClassVar[bool] = True  # whether a layer has attention at all
    supports_cross: ClassVar[bool] = False
    takes_positions: ClassVar[bool] = True  # schemes that act in layers leave others out
    shared_part: ClassVar[str] = "keys and values"  # what layers may take of an earlier one
    keeps_state: ClassVar[bool] = False  # one of constant size, declared by `cached_per_sequence`

    @property
    def window(self) -> int | None:
        """The number of keys that a query attends to, its own included; None for all."""
        return None

    @property
    def sink_tokens(self) -> int:
        """How many of the first tokens stay visible beyond a window."""
        return 0

    @property
    def cap_sinks(self) -> bool:
        """Whether the distance to sink tokens is capped at the length of window and sinks together."""
        return False

    @property
    def sparse(self) -> SparseConfig | None:
        """A pattern of the keys that a query attends to, out of those that the mask and the window show."""
        return None

    @property
    def reach(self) -> int | None:
        """How many tokens back a query can see, its own included: by the window or the pattern; None for all.

        >>> AttentionConfig.from_dict({"window": 6, "sparse": {"kind": "chunked", "chunk": 4}}).reach
        4
        """
        reaches = [self.window, None if self.sparse is None else self.sparse.reach]
        return min((reach for reach in reaches if reach is not None), default=None)

    @property
    def grows(self) -> bool:
        """Whether what a cache keeps grows with the tokens: there is no window, pattern or state that bounds it."""
        return self.reach is None and not self.keeps_state

    def visible_keys(self, length: int, causal: bool) -> float:
        """How many keys a query sees, on average over a row of some tokens.

        >>> AttentionConfig.from_dict({}).visible_keys(9, causal=True)
        5.0
        >>> AttentionConfig.from_dict({"window": 2}).visible_keys(4, causal=True)
        1.75
        """
        if self.sparse is not None:
            return self.sparse.visible_keys(length, causal, self.window)
        window = min(self.window or length, length)
        if not causal:
            return float(window)
        seen = window * length - window * (window - 1) / 2
        return min(seen / length + (self.sink_tokens if window < length else 0), (length + 1) / 2)

    def with_window(self, window: int, sink_tokens: int, cap_sinks: bool) -> Self:
        """The same attention with a window and sink tokens."""
        raise ValueError(f"{self.kind} attention takes no window")

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError for a model that the attention is not defined for."""
        if model.shape == "encoder-decoder" and not self.supports_cross:
            raise ValueError(f"{self.kind} attention has no cross-attention, and this is an encoder-decoder")

    def resolve(self, model: ModelConfig) -> Self:
        """The same attention with those fields filled in that follow from the model, for comparisons."""
        return self

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """What a layer keeps of each token in a cache, by name."""
        shape = self.num_kv_heads_of(model), self.head_dim_of(model)
        return {"keys": CachedTensor(shape), "values": CachedTensor(shape)}

    def cached_per_sequence(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """What a layer keeps of each sequence of any length in a cache, by name: a state."""
        return {}

    def cached_elements(self, model: ModelConfig, tensor: int = 1) -> int:
        """Elements of a token in a cache, on one of `tensor` processes."""
        return sum(prod(cached.shape) for cached in self.cached_per_token(model).values()) // tensor

    def gathered_elements(self, model: ModelConfig, tensor: int = 1) -> int:
        """Elements of a token that context parallelism gathers, on one of `tensor` processes."""
        return self.cached_elements(model, tensor)

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """The weights by their names in the module, with the dimensions that tensor parallelism cuts."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its weights")

    def heads_to_cut(self, model: ModelConfig) -> tuple[int, str]:
        """What tensor parallelism divides, a number that its size has to divide, and what it counts."""
        return self.num_kv_heads_of(model), "key/value heads"

    @property
    def uncuttable_reason(self) -> str | None:
        """Why tensor parallelism cannot cut the heads; None where it can."""
        return None

    def head_dim_of(self, model: ModelConfig) -> int:
        """Features of a head: the model's, unless the attention has its own."""
        return model.head_dim

    def num_kv_heads_of(self, model: ModelConfig) -> int:
        """The number of key/value heads: the model's, unless the attention has its own."""
        return model.num_kv_heads

    @property
    def shared_source(self) -> AttentionConfig | None:
        """The attention of an earlier layer whose `shared_part` is taken; None where it is the layer's own."""
        return None

    def heads_of(self, model: ModelConfig) -> tuple[int, int]:
        """Features of a head, and the number of key/value heads."""
        return self.head_dim_of(model), self.num_kv_heads_of(model)

    def rotated_width(self, model: ModelConfig) -> int:
        """Features of a head, the first ones, that positions may rotate."""
        return self.head_dim_of(model)

    def query_width(self, model: ModelConfig) -> int:
        """Features of the queries of all heads."""
        return model.num_heads * self.head_dim_of(model)

    def output_width(self, model: ModelConfig) -> int:
        """Features of the results of all heads, which the output projection takes."""
        return model.num_heads * self.head_dim_of(model)

    def kv_width(self, model: ModelConfig) -> int:
        """Features of the keys and values that are attended to, of all heads."""
        return self.cached_elements(model)

    def flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """Operations of a forward pass between a token's queries and some keys and values, without projections."""
        return 2 * (self.query_width(model) + self.output_width(model)) * keys

    def saved_elements(self, model: ModelConfig) -> int:
        """Elements per token that are kept for the backward pass, besides keys and values: queries and results."""
        return self.query_width(model) + self.output_width(model)

    def working_elements(self, model: ModelConfig) -> int:
        """Elements per token at work in the backward pass: results, and gradients of all that attention takes."""
        return self.query_width(model) + 2 * self.output_width(model) + 2 * self.kv_width(model)

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Small configurations by name that contract tests run, in a model with a head_dim of 8."""
        return {cls.kind: cls()}
