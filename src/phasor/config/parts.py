"""Configurations of a model's parts: attention, feed-forward, norm, placement, embedding, head, dropout, init."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.activations import ActivationConfig, GELUConfig, ReLUConfig
from phasor.config.cached import CachedTensor
from phasor.config.schema import Choice, Config, not_negative, positive, unknown
from phasor.config.sparse import SparseConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig

Projection = Literal["q", "k", "v", "out"]

QK_NORMS = {
    "none": "queries and keys as projected",
    "head": "each head normalized, one weight shared by all heads (Qwen 3, Gemma 3)",
    "heads": "each head normalized, one weight per head (Cohere, StableLM)",
    "whole": "all heads normalized together (OLMo 2)",
}


class AttentionConfig(Config):
    """Attention; the numbers of heads are fields of ModelConfig.

    `window` is the number of keys a query attends to, its own included; `sink_tokens` keep the first tokens visible
    beyond it, at their true distance or, with `cap_sinks`, at most as far as window and sinks are long. `sink_logits`
    gives every head a learned logit in the softmax. `qk_norm_bias=False` leaves the bias out of the norms of queries
    and keys where the model's other norms have one (StableLM). `sparse` is a pattern of the keys that a query attends
    to, out of those that the mask and the window show.

    >>> AttentionConfig(window=4096, sink_tokens=4).sink_tokens
    4
    """

    bias: tuple[Projection, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    qk_norm: Literal["none", "head", "heads", "whole"] = "none"
    qk_norm_bias: bool = True
    clip: float | None = None
    sink_logits: bool = False
    window: int | None = None
    sink_tokens: int = 0
    cap_sinks: bool = False
    sparse: SparseConfig | None = None

    def check(self) -> None:
        positive(self, "scale", "softcap", "clip", "window")
        not_negative(self, "sink_tokens")
        if self.sink_tokens and self.window is None:
            raise ValueError(
                f"AttentionConfig.sink_tokens={self.sink_tokens} needs a window: without one all tokens are visible"
            )
        if not self.qk_norm_bias and self.qk_norm == "none":
            raise ValueError(
                "AttentionConfig.qk_norm_bias=False needs qk_norm: there is no norm to leave the bias out of"
            )
        if self.cap_sinks and not self.sink_tokens:
            raise ValueError("AttentionConfig.cap_sinks needs sink_tokens: it caps the distance to them")
        if len(set(self.bias)) != len(self.bias):
            raise ValueError(f"AttentionConfig.bias names a projection twice: {list(self.bias)}")
        if self.sparse is not None and self.sink_tokens:
            raise ValueError(
                f"AttentionConfig.sink_tokens={self.sink_tokens} is for a window without a pattern, and sparse is "
                f"{self.sparse.kind!r}"
            )
        if self.sparse is not None and self.window is not None and not self.sparse.takes_window:
            raise ValueError(
                f"AttentionConfig.window={self.window} would hide blocks that the pattern {self.sparse.kind!r} shows: "
                "leave it out"
            )

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """What a layer keeps for each token in a cache, by name; its cross-attention, for each token of the source."""
        heads = CachedTensor((model.num_kv_heads, model.head_dim))
        return {"keys": heads, "values": heads}

    @property
    def reach(self) -> int | None:
        """How many tokens back a query can see, its own included: by the window or the pattern; None for all.

        >>> AttentionConfig(window=6, sparse={"kind": "chunked", "chunk": 4}).reach
        4
        """
        reaches = [self.window, None if self.sparse is None else self.sparse.reach]
        return min((reach for reach in reaches if reach is not None), default=None)


class ExpertsConfig(Config):
    """A mixture of experts in place of one feed-forward network.

    `normalize` rescales the weights of the `top_k` experts to sum to 1. `shared_dim` adds a shared expert for every
    token, weighted by a learned gate with `shared_gate`.
    """

    num_experts: int
    top_k: int = 2
    hidden_dim: int | None = None
    normalize: bool = True
    router_bias: bool = False
    shared_dim: int | None = None
    shared_gate: bool = False

    def check(self) -> None:
        positive(self, "num_experts", "top_k", "hidden_dim", "shared_dim")
        if self.top_k > self.num_experts:
            raise ValueError(f"ExpertsConfig.top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if self.shared_gate and self.shared_dim is None:
            raise ValueError("ExpertsConfig.shared_gate needs shared_dim: there is no shared expert to gate")


class FeedForwardConfig(Config):
    """The feed-forward network: an activation, plain or gated, and optionally experts.

    >>> FeedForwardConfig(activation="swiglu").gated
    True
    """

    activation: ActivationConfig = ReLUConfig()
    bias: bool = False
    experts: ExpertsConfig | None = None

    @property
    def gated(self) -> bool:
        """Whether the activation takes a gate beside the up projection."""
        return self.activation.gated


class NormConfig(Choice, what="norm"):
    """Normalization of hidden states."""


class LayerNormConfig(NormConfig, kind="layernorm"):
    """(x - mean) / sqrt(variance + eps) * weight + bias.

    `weight` and `bias` are learned parameters that may be left out (an option of OPT leaves out both).
    """

    eps: float = 1e-5
    bias: bool = True
    weight: bool = True

    def check(self) -> None:
        positive(self, "eps")


class RMSNormConfig(NormConfig, kind="rmsnorm"):
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with a unit offset."""

    eps: float = 1e-6
    unit_offset: bool = False

    def check(self) -> None:
        positive(self, "eps")


class NoNormConfig(NormConfig, kind="none"):
    """x, unchanged."""


class PlacementConfig(Choice, what="placement"):
    """Placement of norms and residual connections around the sub-layers of a block."""

    multiplier: float = 1.0
    final_norm: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "multiplier")


class PreConfig(PlacementConfig, kind="pre"):
    """x + f(norm(x)).

    With `normed_stream` it is h + f(h), h = norm(x) (an option of BLOOM).
    `first_norm` false leaves out the very first norm, where the embedding has one already (ModernBERT).
    """

    normed_stream: bool = False
    first_norm: bool = True


class PostConfig(PlacementConfig, kind="post"):
    """norm(x + f(x)), as in the 2017 Transformer."""

    final_norm: ClassVar[bool] = False


class SandwichConfig(PlacementConfig, kind="sandwich"):
    """x + norm(f(norm(x))), a norm on both sides (Gemma 2, Grok-1)."""


class DeepNormConfig(PlacementConfig, kind="deepnorm"):
    """norm(alpha x + f(x)), alpha and the initialization's beta set by the depth."""

    final_norm: ClassVar[bool] = False


class OutputConfig(PlacementConfig, kind="output"):
    """x + norm(f(x)), the norm on the sub-layer's output (OLMo 2)."""


class ParallelConfig(PlacementConfig, kind="parallel"):
    """x + attention(norm(x)) + feedforward(norm(x)), one norm for both (PaLM, GPT-J) or one each (NeoX)."""

    shared_norm: bool = True


class EmbeddingConfig(Config):
    """The embedding layer, and whether the output layer shares its weights (`tied`).

    `scale` multiplies the token embeddings ("sqrt": the square root of the width); with `round_scale` it is rounded to
    their dtype first (Gemma). `norm` follows the sum of token, position and type embeddings. `width` is the embedding
    width where it differs from `dim`; projected to `dim` are the token embeddings or, with `project="sum"`, the
    normalized sum, with a bias (RoFormer, ELECTRA).
    """

    tied: bool = True
    scale: float | Literal["sqrt"] = 1.0
    round_scale: bool = False
    norm: bool = False
    width: int | None = None
    project: Literal["tokens", "sum"] = "tokens"
    token_types: int = 0
    source_vocab_size: int | None = None

    def check(self) -> None:
        positive(self, "width", "source_vocab_size")
        if self.project == "sum" and self.width is None:
            raise ValueError("EmbeddingConfig.project='sum' needs width: without one there is nothing to project")
        if self.scale != "sqrt":
            positive(self, "scale")
        not_negative(self, "token_types")


POOLERS = {
    "none": "no vector for the whole sequence",
    "first": "tanh(dense(h)) of the first real token, as in BERT",
    "cls": "the first real token's vector as it is",
    "mean": "the mean over the real tokens",
    "max": "the maximum over the real tokens, per feature",
}
Pooling = Literal["none", "first", "cls", "mean", "max"]


class HeadConfig(Choice, what="head"):
    """The model's output."""

    pooler: Pooling = "none"


class LogitsConfig(HeadConfig):
    """What heads with logits over the vocabulary share; the multiplier "rsqrt" is 1/sqrt(dim)."""

    bias: bool = False
    multiplier: float | Literal["rsqrt"] = 1.0
    softcap: float | None = None

    def check(self) -> None:
        positive(self, "softcap")
        if self.multiplier != "rsqrt":
            positive(self, "multiplier")


class LanguageHeadConfig(LogitsConfig, kind="lm"):
    """Logits over the vocabulary, with an optional multiplier and soft-cap."""


class MaskedHeadConfig(LogitsConfig, kind="mlm"):
    """BERT's masked-language-model head: dense, activation, norm, then logits."""

    bias: bool = True
    dense_bias: bool = True
    activation: ActivationConfig = GELUConfig()

    def check(self) -> None:
        super().check()
        if self.activation.gated:
            plain = sorted(kind for kind, cls in ActivationConfig.kinds.items() if not cls.gated)
            raise unknown("activation of the masked head", self.activation.kind, plain)


class NoHeadConfig(HeadConfig, kind="none"):
    """The last hidden states.

    `project` projects them to the embedding width (OPT-350m).
    """

    project: bool = False


class PooledHeadConfig(HeadConfig, kind="pooled"):
    """One vector per sequence, from the pooler; `normalize` scales it to unit length."""

    pooler: Pooling = "first"
    normalize: bool = False

    def check(self) -> None:
        if self.pooler == "none":
            known = ", ".join(name for name in POOLERS if name != "none")
            raise ValueError(f"PooledHeadConfig.pooler must be one of {known}: the pooled vector is its output")


class DropoutConfig(Config):
    """Dropout probabilities."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0
    feedforward: float = 0.0

    def check(self) -> None:
        for name in ("embedding", "attention", "residual", "feedforward"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"DropoutConfig.{name} must be in [0, 1), not {getattr(self, name)}")


class InitConfig(Choice, what="initialization"):
    """Weight initialization."""


class NormalInitConfig(InitConfig, kind="normal"):
    """Normal with one standard deviation; `by_depth` divides residual outputs by sqrt(2 layers), as GPT-2 does."""

    std: float = 0.02
    by_depth: bool = False

    def check(self) -> None:
        positive(self, "std")


class XavierInitConfig(InitConfig, kind="xavier"):
    """Xavier normal for every projection, token embeddings with std 1/sqrt(dim)."""


class FanInInitConfig(InitConfig, kind="fan-in"):
    """Normal with std 1/sqrt(fan-in) for projections and 1 for token embeddings, as in PaLM."""


class T5InitConfig(InitConfig, kind="t5"):
    """T5's: fan-in, queries smaller by sqrt(head_dim) instead of scaled scores, token embeddings with std 1."""
