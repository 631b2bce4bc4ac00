"""Configurations of a model's parts: feed-forward, norm, placement, embedding, dropout, init."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.activations import ActivationConfig, ReLUConfig
from phasor.config.experts import ExpertsConfig
from phasor.config.front_end import FrontEndConfig
from phasor.config.schema import MOST_FEATURES, MOST_WIDTH, Choice, Config, not_negative, positive
from phasor.config.weights import Weight, Weights, linear, with_prefixes

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class FeedForwardConfig(Config):
    """The feed-forward network: an activation, plain or gated, and optionally experts.

    `hidden_dim` stands for the model's in the layers with this network; 0 is no network, in a layer of attention alone.

    >>> FeedForwardConfig(activation="swiglu").gated
    True
    """

    activation: ActivationConfig = ReLUConfig()
    bias: bool = False
    hidden_dim: int | None = None
    experts: ExpertsConfig | None = None

    def check(self) -> None:
        if self.present:
            positive(self, "hidden_dim", most=MOST_WIDTH)
        elif self.experts is not None:
            raise ValueError("FeedForwardConfig.hidden_dim 0 is no network, and it has experts")
        if self.bias and self.experts is not None and self.experts.expert_scale:
            raise ValueError("ExpertsConfig.expert_scale is for experts without a bias, and bias is set")
        if self.activation.weights and self.experts is not None:
            raise ValueError(f"the activation {self.activation.kind!r} learns weights, and those of experts learn none")

    def hidden_dim_of(self, model: ModelConfig) -> int:
        """The hidden width of the network, or of an expert whose width is not set."""
        return model.hidden_dim if self.hidden_dim is None else self.hidden_dim

    @property
    def present(self) -> bool:
        """Whether a layer has a feed-forward network at all."""
        return self.hidden_dim != 0

    @property
    def branch_norms(self) -> bool:
        """Whether the network takes the residual stream as it is, and has its norms inside."""
        return self.experts is not None and self.experts.branch_norms

    @property
    def gated(self) -> bool:
        """Whether the activation takes a gate beside the up projection."""
        return self.activation.gated

    def weights(self, dim: int, hidden_dim: int) -> Weights:
        """The weights by their names in the module: hidden features are cut, or experts; all need the router."""
        experts, pieces = self.experts, 2 if self.gated else 1
        if not self.present:
            return {}
        if experts is None:
            up = linear(pieces * hidden_dim, dim, bias=self.bias, cut=0, pieces=pieces)
            learned = {name: Weight((1,)) for name in self.activation.weights}
            down = linear(dim, hidden_dim, bias=self.bias, cut=1)
            return with_prefixes({"up": up, "down": down, "activation": learned})
        count, hidden = experts.num_experts, experts.hidden_dim or hidden_dim
        width = experts.latent_dim or dim
        shapes: dict[str, tuple[int, ...]] = {"up": (count, width, pieces * hidden), "down": (count, hidden, width)}
        if self.bias:
            shapes |= {"up_bias": (count, pieces * hidden), "down_bias": (count, width)}
        found = {name: Weight(shape, cut=0, experts=count) for name, shape in shapes.items()}
        if experts.expert_scale:
            found["expert_scale"] = Weight((count,))
        others = {"router": linear(count, dim, bias=experts.router_bias)}
        if experts.shared_dim is not None:
            others["shared"] = self.replace(experts=None).weights(dim, experts.shared_dim)
        if experts.latent_dim is not None:
            others |= {"latent_down": linear(width, dim), "latent_up": linear(dim, width)}
        if experts.shared_gate:
            others["shared_gate"] = linear(1, dim)
        return found | with_prefixes(others)


class NormConfig(Choice, what="norm"):
    """Normalization of hidden states."""

    def without_weights(self) -> NormConfig:
        """The same norm, with nothing learned."""
        return self

    def weights(self, *shape: int, cut: int | None = None) -> Weights:
        """What a norm over this shape learns."""
        return {}


class LayerNormConfig(NormConfig, kind="layernorm"):
    """(x - mean) / sqrt(variance + eps) * weight + bias.

    `weight` and `bias` are learned parameters that may be left out (an option of OPT leaves out both). With a unit
    offset the factor is 1 + weight (Nemotron).
    """

    eps: float = 1e-5
    bias: bool = True
    weight: bool = True
    unit_offset: bool = False

    def check(self) -> None:
        positive(self, "eps")
        if self.unit_offset and not self.weight:
            raise ValueError("LayerNormConfig.unit_offset needs weight: there is nothing to add 1 to")

    def weights(self, *shape: int, cut: int | None = None) -> Weights:
        learned = {"weight": self.weight, "bias": self.bias}
        return {name: Weight(shape, cut) for name, is_learned in learned.items() if is_learned}

    def without_weights(self) -> NormConfig:
        return self.replace(weight=False, bias=False)


class RMSNormConfig(NormConfig, kind="rmsnorm"):
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with a unit offset.

    `weight` is learned, and may be left out.
    """

    eps: float = 1e-6
    unit_offset: bool = False
    weight: bool = True

    def check(self) -> None:
        positive(self, "eps")
        if self.unit_offset and not self.weight:
            raise ValueError("RMSNormConfig.unit_offset is added to the weight: it needs weight=True")

    def weights(self, *shape: int, cut: int | None = None) -> Weights:
        return {"weight": Weight(shape, cut)} if self.weight else {}

    def without_weights(self) -> NormConfig:
        return self.replace(weight=False, unit_offset=False)


class NoNormConfig(NormConfig, kind="none"):
    """x, unchanged."""


class PlacementConfig(Choice, what="placement"):
    """Placement of norms and residual connections around the sub-layers of a block.

    What sub-layers add is multiplied by `multiplier`. With `block_scale` the output of a block is multiplied by a
    number that the block has learned (Gemma 4).
    """

    multiplier: float = 1.0
    block_scale: bool = False
    final_norm: ClassVar[bool] = True
    norms_per_sublayer: ClassVar[int] = 1

    def check(self) -> None:
        positive(self, "multiplier")

    def norms(self, sublayers: int, *, first: bool = False) -> range:
        """The numbers of a block's norms, or of the first block's."""
        return range(self.norms_per_sublayer * sublayers)


class PreConfig(PlacementConfig, kind="pre"):
    """x + f(norm(x)).

    With `normed_stream` it is h + f(h), h = norm(x) (an option of BLOOM).
    `first_norm` false leaves out the very first norm, where the embedding has one already (ModernBERT).
    """

    normed_stream: bool = False
    first_norm: bool = True

    def norms(self, sublayers: int, *, first: bool = False) -> range:
        return range(1 if first and not self.first_norm else 0, sublayers)


class PostConfig(PlacementConfig, kind="post"):
    """norm(x + f(x)), as in the 2017 Transformer."""

    final_norm: ClassVar[bool] = False


class SandwichConfig(PlacementConfig, kind="sandwich"):
    """x + norm(f(norm(x))), a norm on both sides (Gemma 2, Grok-1)."""

    norms_per_sublayer: ClassVar[int] = 2


class DeepNormConfig(PlacementConfig, kind="deepnorm"):
    """norm(alpha x + f(x)), alpha and the initialization's beta set by the depth."""

    final_norm: ClassVar[bool] = False


class OutputConfig(PlacementConfig, kind="output"):
    """x + norm(f(x)), the norm on the sub-layer's output (OLMo 2)."""


class ParallelConfig(PlacementConfig, kind="parallel"):
    """x + attention(norm(x)) + feedforward(norm(x)), one norm for both (PaLM, GPT-J) or one each (NeoX)."""

    shared_norm: bool = True

    def norms(self, sublayers: int, *, first: bool = False) -> range:
        return range(1 if self.shared_norm else sublayers)


class EmbeddingConfig(Config):
    """The embedding layer, and whether the output layer shares its weights (`tied`).

    `scale` multiplies the token embeddings ("sqrt": the square root of the width); with `round_scale` it is rounded to
    their dtype first (Gemma). `norm` follows the sum of token, position and type embeddings. `width` is the embedding
    width where it differs from `dim`; projected to `dim` are the token embeddings or, with `project="sum"`, the
    normalized sum, with a bias (RoFormer, ELECTRA). With `per_layer_width` a token has a second vector for every layer,
    of that width, which the layer's block adds to its output through a gate (Gemma 4 E2B). With `mask_token` vectors of
    that token are zero, and all others are scaled by 0.88 and divided by the share of the sequence's tokens that are
    others (token dropout of ESM-2, which trained with 12 % of them masked). A `front_end` makes a source of features.
    """

    tied: bool = True
    scale: float | Literal["sqrt"] = 1.0
    round_scale: bool = False
    norm: bool = False
    width: int | None = None
    project: Literal["tokens", "sum"] = "tokens"
    token_types: int = 0
    source_vocab_size: int | None = None
    per_layer_width: int | None = None
    mask_token: int | None = None
    front_end: FrontEndConfig | None = None

    def check(self) -> None:
        positive(self, "width", "per_layer_width", most=MOST_FEATURES)
        positive(self, "source_vocab_size", most=MOST_WIDTH)
        if self.project == "sum" and self.width is None:
            raise ValueError("EmbeddingConfig.project='sum' needs width: without one there is nothing to project")
        if self.scale != "sqrt":
            positive(self, "scale")
        not_negative(self, "token_types", "mask_token", most=MOST_WIDTH)

    def table(self, vocab_size: int, dim: int) -> Weights:
        """The weights of a token table, and of the projection to the width of a stack where there is one."""
        width = self.width or dim
        found = {"weight": Weight((vocab_size, width))}
        projects = self.width is not None and self.project == "tokens"
        return found | with_prefixes({"project": linear(dim, width)} if projects else {})

    def weights(self, model: ModelConfig) -> Weights:
        """The weights in front of the stacks, by their names in the model."""
        parts = {"tokens": self.table(model.vocab_size, model.dim)}
        if self.source_vocab_size is not None:
            parts["source_tokens"] = self.table(self.source_vocab_size, model.for_side("encoder").dim)
        if self.per_layer_width is not None:
            width = model.num_layers * self.per_layer_width
            others = {"project": linear(width, model.dim), "norm": model.norm.weights(self.per_layer_width)}
            parts["per_layer"] = {"weight": Weight((model.vocab_size, width))} | with_prefixes(others)
        if self.front_end is not None:
            parts["front_end"] = self.front_end.weights()
        return with_prefixes(parts)

    def stack_weights(self, model: ModelConfig) -> Weights:
        """The weights that each stack has for its input, by their names in it."""
        parts: dict[str, Weights] = {}
        if self.token_types:
            parts["token_types"] = {"weight": Weight((self.token_types, model.input_width))}
        if self.norm:
            parts["embedding_norm"] = model.norm.weights(model.input_width)
        if self.project == "sum":
            parts["project"] = linear(model.dim, model.input_width, bias=True)
        return with_prefixes(parts)

    def block_weights(self, model: ModelConfig) -> Weights:
        """The weights that each block has for the vectors of its tokens, by their names in it."""
        if (width := self.per_layer_width) is None:
            return {}
        parts = {"gate": linear(width, model.dim), "project": linear(model.dim, width)}
        return with_prefixes({"layer_input": with_prefixes(parts | {"norm": model.norm.weights(model.dim)})})


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
