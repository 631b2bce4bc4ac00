"""The configuration of multi-head latent attention."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, Self

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.parts import LayerNormConfig
from phasor.config.schema import MOST_FEATURES, MOST_LENGTH, MOST_WIDTH, Config, positive
from phasor.config.weights import Weights, linear, with_prefixes

Projection = Literal["q_down", "kv_down", "out"]


class LatentSizes(NamedTuple):
    """Features of a head that positions may rotate, those that they may not, of its value, and of the latent vector."""

    rope: int
    nope: int
    value: int
    rank: int


class IndexerConfig(Config):
    """A choice of the `top_k` tokens that a query attends to, by the scores of small heads (DeepSeek V3.2).

    A token's score is the sum of `relu(q k)` over the heads, weighted by what the query's token says of each head.
    Training leaves its weights as they are.
    """

    num_heads: int = 64
    head_dim: int = 128
    top_k: int = 2048
    norm: ClassVar[LayerNormConfig] = LayerNormConfig(eps=1e-6)

    def check(self) -> None:
        positive(self, "num_heads", "head_dim", most=MOST_FEATURES)
        positive(self, "top_k", most=MOST_LENGTH)

    def weights(self, q_rank: int, dim: int) -> Weights:
        """The weights by their names in the module; every process has all of them, and chooses the same tokens."""
        projections = {
            "q": linear(self.num_heads * self.head_dim, q_rank),
            "k": linear(self.head_dim, dim),
            "k_norm": self.norm.weights(self.head_dim),
            "head_weights": linear(self.num_heads, dim),
        }
        return with_prefixes(projections)


class LatentAttentionConfig(AttentionConfig, kind="latent"):
    """Multi-head latent attention (MLA, DeepSeek V2): a token keeps one latent vector and one rotated key.

    Keys and values of all heads are projections of the latent vector, `kv_rank` wide. The first `rope_dim` features of
    a head's key are not: they are one key for all heads, and the only ones that positions rotate. `value_dim` is
    the width of a head's value. Left out, the three are as in DeepSeek V2: a third of the head is rotated, values are
    as wide as the rest of it, and the latent vector is four times as wide as a value. Queries come from a vector
    `q_rank` wide, or straight from the input. Both vectors are normalized, with `norm_eps` in place of the norm's eps.
    Every head has separate keys and values: `num_kv_heads` is for layers with other attention. With an `indexer` a
    query attends to a few chosen tokens; with `shared_index` to those that the layer before it with the same attention,
    but for that, has chosen.

    >>> from phasor.config import ModelConfig
    >>> model = ModelConfig(vocab_size=9, dim=5120, num_layers=1, num_heads=128, head_dim=192, attention="latent")
    >>> model.attention.sizes(model)
    LatentSizes(rope=64, nope=128, value=128, rank=512)
    >>> model.attention.cached_elements(model)  # instead of 128 heads x (192 + 128)
    576
    """

    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None
    bias: tuple[Projection, ...] = ()
    scale: float | None = None
    norm_eps: float | None = None
    indexer: IndexerConfig | None = None
    shared_index: bool = False
    shared_part: ClassVar[str] = "index"

    def check(self) -> None:
        positive(self, "q_rank", "kv_rank", "rope_dim", "value_dim", most=MOST_WIDTH)
        positive(self, "scale", "norm_eps")
        if len(set(self.bias)) != len(self.bias):
            raise ValueError(f"LatentAttentionConfig.bias names a projection twice: {list(self.bias)}")
        if "q_down" in self.bias and self.q_rank is None:
            raise ValueError("LatentAttentionConfig.bias names 'q_down', which there is with q_rank alone")

        if self.indexer is not None and self.q_rank is None:
            raise ValueError("LatentAttentionConfig.indexer needs q_rank: its queries come from the same vector")
        if self.shared_index and self.indexer is None:
            raise ValueError("LatentAttentionConfig.shared_index needs indexer: that of the layer whose index it takes")

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        sizes = self.sizes(model)
        if self.indexer is not None and model.shape != "decoder":
            raise ValueError(f"LatentAttentionConfig.indexer is for decoders, and this is an {model.shape}")
        if self.indexer is not None and self.indexer.head_dim < sizes.rope:
            raise ValueError(
                f"IndexerConfig.head_dim must be at least the {sizes.rope} rotated features of a head, not "
                f"{self.indexer.head_dim}"
            )
        if self.norm_eps is not None and not hasattr(model.norm, "eps"):
            raise ValueError(f"LatentAttentionConfig.norm_eps is for norms with an eps, and not {model.norm.kind!r}")
        if sizes.nope < 1:
            raise ValueError(
                f"LatentAttentionConfig.rope_dim is {sizes.rope}, and a head has {model.head_dim} features: at least "
                "one has to come from the latent vector"
            )
        layers = (model.layer(index) for index in range(max(1, len(model.layers))))
        for position in (part for layer in layers if layer.attention == self for part in layer.position.parts):
            if not position.takes_latent_keys:
                raise ValueError(
                    f"latent attention takes positions that rotate the first features of queries and keys alone or "
                    f"act on scores by positions alone, and not {position.kind!r} on "
                    f"{', '.join(position.acts_on)}"
                )
            by_head = "queries" in position.acts_on and position.weight_shapes(model)
            if self.indexer is not None and (by_head or "scores" in position.acts_on):
                raise ValueError(
                    "LatentAttentionConfig.indexer takes no positions on scores and none with weights of heads, such "
                    f"as {position.kind!r}"
                )

    def sizes(self, model: ModelConfig) -> LatentSizes:
        """The widths of a head's parts and of the latent vector."""
        rope = max(2, model.head_dim // 6 * 2) if self.rope_dim is None else self.rope_dim
        value = max(1, model.head_dim - rope) if self.value_dim is None else self.value_dim
        return LatentSizes(rope, model.head_dim - rope, value, 4 * value if self.kv_rank is None else self.kv_rank)

    def resolve(self, model: ModelConfig) -> Self:
        rope, _, value, rank = self.sizes(model)
        scale = model.head_dim**-0.5 if self.scale is None else self.scale
        bias = tuple(sorted(self.bias))
        norm_eps = getattr(model.norm, "eps", None) if self.norm_eps is None else self.norm_eps
        return self.replace(kv_rank=rank, rope_dim=rope, value_dim=value, bias=bias, scale=scale, norm_eps=norm_eps)

    @property
    def shared_source(self) -> AttentionConfig | None:
        return self.replace(shared_index=False) if self.shared_index else None

    def rotated_width(self, model: ModelConfig) -> int:
        return self.sizes(model).rope

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """The rotated key and the latent vector after it, which all heads share, and the key of the indexer."""
        sizes = self.sizes(model)
        latents = {"latents": CachedTensor((1, sizes.rope + sizes.rank))}
        own = None if self.shared_index else self.indexer
        return latents if own is None else latents | {"index_keys": CachedTensor((1, own.head_dim))}

    def cached_elements(self, model: ModelConfig, tensor: int = 1) -> int:
        """All of it on every process, since all heads take it."""
        return super().cached_elements(model)

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """What gives all heads of a process their queries, keys and values is cut by heads, the rest is on each."""
        sizes, queries = self.sizes(model), self.query_width(model)
        found: dict[str, Weights] = {}
        if self.q_rank is None:
            found["q"] = linear(queries, model.dim, cut=0)
        else:
            found["q_down"] = linear(self.q_rank, model.dim, bias="q_down" in self.bias)
            found["q_norm"] = model.norm.weights(self.q_rank)
            found["q_up"] = linear(queries, self.q_rank, cut=0)
        found["kv_down"] = linear(sizes.rope + sizes.rank, model.dim, bias="kv_down" in self.bias)
        found["kv_norm"] = model.norm.weights(sizes.rank)
        found["kv_up"] = linear(model.num_heads * (sizes.nope + sizes.value), sizes.rank, cut=0)
        found["out"] = linear(model.dim, self.output_width(model), bias="out" in self.bias, cut=1)
        if self.indexer is not None and not self.shared_index:
            assert self.q_rank is not None
            found["indexer"] = self.indexer.weights(self.q_rank, model.dim)
        return with_prefixes(found)

    def visible_keys(self, length: int, causal: bool) -> float:
        if self.indexer is None:
            return super().visible_keys(length, causal)
        few = min(self.indexer.top_k, length)
        return few - few * (few - 1) / 2 / length

    def heads_to_cut(self, model: ModelConfig) -> tuple[int, str]:
        return model.num_heads, "heads"

    def output_width(self, model: ModelConfig) -> int:
        return model.num_heads * self.sizes(model).value

    def kv_width(self, model: ModelConfig) -> int:
        return self.query_width(model) + self.output_width(model)

    def saved_elements(self, model: ModelConfig) -> int:
        """The latent vectors too, before and after their norms."""
        return super().saved_elements(model) + 2 * (self.cached_elements(model) + (self.q_rank or 0))

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "latent": cls(),
            "latent-ranks": cls(q_rank=6, kv_rank=10, rope_dim=4, value_dim=3, bias=("q_down", "kv_down", "out")),
            "latent-indexer": cls(q_rank=6, rope_dim=4, indexer=IndexerConfig(num_heads=9, head_dim=6, top_k=5)),
        }
