"""What T5 and mT5 share: one class does for both of T5's versions, and for an encoder alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from phasor.config import (
    ActivationConfig,
    AttentionConfig,
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    LanguageHeadConfig,
    ModelConfig,
    NoHeadConfig,
    RMSNormConfig,
    T5InitConfig,
)
from phasor.config.model import Side
from phasor.models.family import ACTIVATIONS, GATES, Family, require_kind
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, cross_projections, glu, linear, projections
from phasor.nn.positions import T5PositionConfig

LENGTH = 512  # of the texts it was trained with; its positions have no end
# T5 calls the tanh approximation "gelu" where it is a gate, and by its own name where it is not.
NAMES = {"gelu-tanh": "gelu_new", "geglu-tanh": "gelu_new", "geglu": "gelu", "swiglu": "silu", "reglu": "relu"}
NAMES |= {"glu": "sigmoid"}


class T5Like(Family):
    """Pre-norm with RMS norms, a bias by distance that all layers of a stack share, scores not divided, no biases.

    `encoder` is the class that is an encoder alone, `usual` the feed-forward network of a file that names none.
    """

    encoder: ClassVar[str]
    usual: ClassVar[str]
    prefix = ""
    embedding = "shared.weight"
    copies = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
    passthrough = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    unsupported: ClassVar[frozenset[str]] = frozenset({"is_decoder"})
    harmless = frozenset({"classifier_dropout", "initializer_factor", "num_decoder_layers", "output_past"})

    def read(self, f: Fields) -> ModelConfig:
        alone = f.get("architectures", None) == [self.encoder]
        depth, dim, heads = f.get("num_layers"), f.get("d_model"), f.get("num_heads")
        same = {"num_hidden_layers": depth, "hidden_size": dim, "num_attention_heads": heads, "head_dim": f.get("d_kv")}
        for name, value in same.items():
            f.expect(name, value)
        sides: dict[str, Any] = {"shape": "encoder", "num_layers": depth}
        if not alone:
            f.expect("is_encoder_decoder", True)
            sides = {"shape": "encoder-decoder", "num_encoder_layers": depth}
            sides["num_layers"] = f.get("num_decoder_layers", depth)
        drop = f.get("dropout_rate", 0.1)
        return ModelConfig(
            **sides,
            vocab_size=f.get("vocab_size"),
            dim=dim,
            hidden_dim=f.get("d_ff"),
            num_heads=heads,
            head_dim=f.get("d_kv"),
            max_length=f.get("n_positions", LENGTH),
            position=T5PositionConfig(
                num_buckets=f.get("relative_attention_num_buckets", 32),
                max_distance=f.get("relative_attention_max_distance", 128),
            ),
            attention=AttentionConfig(scale=1.0),
            feedforward=FeedForwardConfig(activation=self.read_activation(f)),
            norm=RMSNormConfig(eps=f.get("layer_norm_epsilon", 1e-6)),
            embedding=EmbeddingConfig(tied=True),  # in transformers too, unless the file has a head
            head=self.read_head(f),
            dropout=DropoutConfig(embedding=drop, attention=drop, residual=drop, feedforward=drop),
            init=T5InitConfig(),
        )

    def read_head(self, f: Fields) -> HeadConfig:
        return LanguageHeadConfig() if self.head_kind(f) == "lm" else NoHeadConfig()

    def read_activation(self, f: Fields) -> ActivationConfig:
        """The activation of `feed_forward_proj`; `dense_act_fn` and `is_gated_act` of newer files take precedence."""
        word = f.get("feed_forward_proj", self.usual)
        kind, _, name = str(word).rpartition("-")
        name = f.get("dense_act_fn", "gelu_new" if word == "gated-gelu" else name)
        known = GATES if f.flag("is_gated_act", kind == "gated") else ACTIVATIONS
        if kind not in ("", "gated") or name not in known:
            raise ValueError(
                f"{f.file}: phasor does not know feed_forward_proj = {json_repr(word)} with {json_repr(name)}"
            )
        return ActivationConfig.from_dict({"kind": known[name]})

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.shape == "decoder":
            raise ValueError("its shape is an encoder, or an encoder-decoder, and not a decoder")
        position, norm = require_kind(config.position, T5PositionConfig), require_kind(config.norm, RMSNormConfig)
        activation, gate = config.feedforward.activation.kind, config.feedforward.gated
        name = NAMES.get(activation, activation)
        word = "gelu" if activation == "geglu-tanh" else name
        fields = {
            "vocab_size": config.vocab_size,
            "d_model": config.dim,
            "d_kv": config.head_dim,
            "d_ff": config.hidden_dim,
            "num_layers": config.depth("encoder"),
            "num_heads": config.num_heads,
            "relative_attention_num_buckets": position.num_buckets,
            "relative_attention_max_distance": position.max_distance,
            "dropout_rate": config.dropout.residual,
            "layer_norm_epsilon": norm.eps,
            "feed_forward_proj": f"gated-{word}" if gate else word,
            "dense_act_fn": name,
            "is_gated_act": gate,
            "is_encoder_decoder": config.shape == "encoder-decoder",
        }
        if config.shape == "encoder-decoder":
            fields["num_decoder_layers"] = config.num_layers
        return fields if config.max_length == LENGTH else fields | {"n_positions": config.max_length}

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        alone = config.shape == "encoder" and config.head.kind == "none"
        return self.encoder if alone else super().architecture(config, passthrough)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from self.stack("encoder", ("SelfAttention",), config)
        yield from self.stack("decoder", ("SelfAttention", "EncDecAttention"), config)

    def stack(self, side: Side, attentions: tuple[str, ...], config: ModelConfig) -> Iterator[Rule]:
        """One of the two stacks: its attentions stand one after the other in a block, the feed-forward network last."""
        block, layer = f"{side}.blocks.{{i}}", f"{side}.block.{{i}}.layer"
        first = f"{side}.block.0.layer.0.SelfAttention"
        yield Rule(f"{side}.positions.0.weight", f"{first}.relative_attention_bias.weight")
        yield from linear(f"{side}.norm", f"{side}.final_layer_norm")
        yield from projections(f"{block}.attention", f"{layer}.0.{attentions[0]}", ("q", "k", "v"))
        yield from linear(f"{block}.attention.out", f"{layer}.0.{attentions[0]}.o")
        if len(attentions) > 1:
            yield from cross_projections(f"{block}.cross", f"{layer}.1.{attentions[1]}", ("q", "k", "v"))
            yield from linear(f"{block}.cross.out", f"{layer}.1.{attentions[1]}.o")
        last = len(attentions)
        for index in range(last + 1):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{index}.layer_norm")
        dense = f"{layer}.{last}.DenseReluDense"
        if config.feedforward.gated:
            yield from glu(f"{block}.feedforward.up", f"{dense}.wi_0", f"{dense}.wi_1")
        else:
            yield from linear(f"{block}.feedforward.up", f"{dense}.wi")
        yield from linear(f"{block}.feedforward.down", f"{dense}.wo")
