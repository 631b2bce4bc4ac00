"""Configurations of heads: what follows the last hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.activations import ActivationConfig, GELUConfig
from phasor.config.schema import MOST_FEATURES, Choice, Config, positive, unknown
from phasor.config.weights import Weight, Weights, linear, with_prefixes

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig
    from phasor.config.parts import EmbeddingConfig

POOLERS = {
    "none": "no vector for the whole sequence",
    "first": "tanh(dense(h)) of the first real token, as in BERT",
    "cls": "the first real token's vector as it is",
    "mean": "the mean over the real tokens",
    "max": "the maximum over the real tokens, per feature",
    "last": "the last real token's vector as it is",
    "last-dense": "tanh(dense(h)) of the last real token, as in BART's classifiers",
}
Pooling = Literal["none", "first", "cls", "mean", "max", "last", "last-dense"]


class HeadConfig(Choice, what="head"):
    """The model's output; `of_sequence` kinds give one vector per sequence, from the pooler."""

    pooler: Pooling = "none"
    of_sequence: ClassVar[bool] = False

    def check(self) -> None:
        if self.of_sequence and self.pooler == "none":
            known = ", ".join(name for name in POOLERS if name != "none")
            raise ValueError(
                f"{type(self).__name__}.pooler must be one of {known}: the head's output is the pooled vector"
            )

    @property
    def has_dense_pooler(self) -> bool:
        """Whether the pooler has a dense layer."""
        return self.pooler in ("first", "last-dense")

    def pooler_weights(self, model: ModelConfig) -> Weights:
        """The weights of the pooler, by their names in it."""
        return with_prefixes({"dense": linear(model.dim, model.dim, bias=True)} if self.has_dense_pooler else {})

    def weights(self, model: ModelConfig) -> Weights:
        """The weights of the head, by their names in it."""
        return {}


class LogitsConfig(HeadConfig):
    """What heads with logits over the vocabulary share; the multiplier "rsqrt" is 1/sqrt(dim)."""

    bias: bool = False
    multiplier: float | Literal["rsqrt"] = 1.0
    softcap: float | None = None

    def check(self) -> None:
        super().check()
        positive(self, "softcap")
        if self.multiplier != "rsqrt":
            positive(self, "multiplier")

    def projects(self, embedding: EmbeddingConfig) -> bool:
        """Whether a linear layer projects back to the width of the token table."""
        return embedding.width is not None

    def weights(self, model: ModelConfig) -> Weights:
        width = model.embedding.width or model.dim
        found = {} if model.embedding.tied else {"weight": Weight((model.vocab_size, width))}
        found |= {"bias": Weight((model.vocab_size,))} if self.bias else {}
        return found | with_prefixes({"project": linear(width, model.dim)} if self.projects(model.embedding) else {})


class LanguageHeadConfig(LogitsConfig, kind="lm"):
    """Logits over the vocabulary, with an optional multiplier and soft-cap."""


class MaskedHeadConfig(LogitsConfig, kind="mlm"):
    """BERT's masked-language-model head: dense, activation, norm, then logits."""

    bias: bool = True
    dense_bias: bool = True
    activation: ActivationConfig = GELUConfig()

    def check(self) -> None:
        super().check()
        require_plain(self.activation, "activation of the masked head")

    def projects(self, embedding: EmbeddingConfig) -> bool:
        return super().projects(embedding) and embedding.project == "tokens"

    def weights(self, model: ModelConfig) -> Weights:
        dense, norm = linear(model.input_width, model.dim, bias=self.dense_bias), model.norm.weights(model.input_width)
        return super().weights(model) | with_prefixes({"dense": dense, "norm": norm})


class NoHeadConfig(HeadConfig, kind="none"):
    """The last hidden states.

    `project` projects them to the embedding width (OPT-350m).
    """

    project: bool = False

    def weights(self, model: ModelConfig) -> Weights:
        width = model.embedding.width or model.dim
        return with_prefixes({"project": linear(width, model.dim)} if self.project else {})


class DenseConfig(Config):
    """A dense layer behind a pooler: `activation(x W^T + b)`.

    >>> DenseConfig(out_features=768, activation="tanh").bias
    True
    """

    out_features: int
    bias: bool = True
    activation: Literal["identity", "tanh", "relu", "gelu", "silu"] = "identity"

    def check(self) -> None:
        positive(self, "out_features", most=MOST_FEATURES)


class PooledHeadConfig(HeadConfig, kind="pooled"):
    """One vector per sequence, from the pooler and then `dense` layers; `normalize` scales it to unit length.

    >>> [layer.out_features for layer in PooledHeadConfig(dense=({"out_features": 64}, {"out_features": 16})).dense]
    [64, 16]
    """

    pooler: Pooling = "first"
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    of_sequence: ClassVar[bool] = True

    def pooler_weights(self, model: ModelConfig) -> Weights:
        inputs = (model.dim, *(layer.out_features for layer in self.dense))
        layers = enumerate(zip(self.dense, inputs, strict=False))
        found = {f"layers.{i}": linear(layer.out_features, n, bias=layer.bias) for i, (layer, n) in layers}
        return super().pooler_weights(model) | with_prefixes(found)


class ClassifierConfig(HeadConfig):
    """What heads with a score for each of their labels share.

    `dense` is the activation behind a dense layer that comes before the scores, None where there is none; `dense_norm`
    puts a norm behind it.
    """

    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    score_bias: bool = True
    dense: ActivationConfig | None = None
    dense_bias: bool = True
    dense_norm: bool = False

    def check(self) -> None:
        super().check()
        if not self.labels:
            raise ValueError(f"{type(self).__name__}.labels must name at least one label")
        if self.dense is not None:
            require_plain(self.dense, "activation of a classifier's dense layer")
        elif self.dense_norm:
            raise ValueError(f"{type(self).__name__}.dense_norm needs dense: there is no dense layer to normalize")

    def weights(self, model: ModelConfig) -> Weights:
        parts = {"score": linear(len(self.labels), model.dim, bias=self.score_bias)}
        if self.dense is not None:
            parts["dense"] = linear(model.dim, model.dim, bias=self.dense_bias)
        if self.dense_norm:
            parts["norm"] = model.norm.weights(model.dim)
        return with_prefixes(parts)


class SequenceClassifierConfig(ClassifierConfig, kind="sequence-classifier"):
    """Scores of labels for the whole sequence, from the pooler's vector (classifiers, rerankers, reward models).

    >>> SequenceClassifierConfig(labels=("relevance",)).pooler
    'first'
    """

    pooler: Pooling = "first"
    of_sequence: ClassVar[bool] = True


class TokenClassifierConfig(ClassifierConfig, kind="token-classifier"):
    """Scores of labels for every token."""


def require_plain(activation: ActivationConfig, what: str) -> None:
    """Refuse a gated activation where there is no gate, and one that learns weights."""
    if activation.gated or activation.weights:
        plain = sorted(kind for kind, cls in ActivationConfig.kinds.items() if not cls.gated and not cls.weights)
        raise unknown(what, activation.kind, plain)
