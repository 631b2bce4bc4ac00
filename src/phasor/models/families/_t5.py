"""What T5, mT5 and UMT5 share: one class does for both of T5's versions, and for an encoder alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from phasor.config import ClassifierConfig, ModelConfig
from phasor.config.model import Side
from phasor.models.entries import ACTIVATIONS, GATES, Draft, Field, FieldEntry, Pinned, SameAs
from phasor.models.family import Classifier, Family
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, cross_projections, glu, linear, projections

# T5 calls the tanh approximation "gelu" where it is a gate, and by its own name where it is not.
NAMES = {"gelu-tanh": "gelu_new", "geglu-tanh": "gelu_new", "geglu": "gelu", "swiglu": "silu", "reglu": "relu"}
NAMES |= {"glu": "sigmoid"}
BODY = "transformer."  # what the names of classes that classify begin with
CLASSIFIER = {"pooler.dense": "classification_head.dense", "head.score": "classification_head.out_proj"}
LAST_TOKEN = {"head.pooler": "last-dense"}


class Depths(FieldEntry):
    """`num_layers` of the encoder, and `num_decoder_layers` unless the class is one of `encoders`, without a decoder.

    Where a file does not name the decoder's, they are as many as the encoder's, or `absent`.
    """

    def __init__(self, *encoders: str, absent: int | None = None) -> None:
        self.encoders, self.absent = encoders, absent

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        depth = f.get(name)
        f.expect("num_hidden_layers", depth)
        if f.get("architectures", None) in [[name] for name in self.encoders]:
            draft.values |= {"shape": "encoder", "num_layers": depth}
            return
        f.expect("is_encoder_decoder", True)
        decoder = f.get("num_decoder_layers", depth if "num_decoder_layers" in f.data else self.absent or depth)
        draft.values |= {"shape": "encoder-decoder", "num_encoder_layers": depth, "num_layers": decoder}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        both = config.shape == "encoder-decoder"
        fields = {name: config.depth("encoder"), "is_encoder_decoder": both}
        return fields | {"num_decoder_layers": config.num_layers} if both else fields


class FeedForwardProj(FieldEntry):
    """The activation of `feed_forward_proj`; `dense_act_fn` and `is_gated_act` of newer files take precedence."""

    def __init__(self, default: str) -> None:
        self.default = default

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        word = f.get(name, self.default)
        kind, _, activation = str(word).rpartition("-")
        activation = f.get("dense_act_fn", "gelu_new" if word == "gated-gelu" else activation)
        known = GATES if f.flag("is_gated_act", kind == "gated") else ACTIVATIONS
        if kind not in ("", "gated") or activation not in known:
            raise ValueError(f"{f.file}: phasor does not know {name} = {json_repr(word)} with {json_repr(activation)}")
        draft["feedforward.activation"] = known[activation]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        kind, gated = config.feedforward.activation.kind, config.feedforward.gated
        activation = NAMES.get(kind, kind)
        word = "gelu" if kind == "geglu-tanh" else activation
        return {name: f"gated-{word}" if gated else word, "dense_act_fn": activation, "is_gated_act": gated}


def t5_classifiers(name: str) -> dict[str, Classifier]:
    """The classes that classify, whose names begin so: of sequences with both stacks, of tokens with the encoder."""
    return {
        "sequence-classifier": Classifier(f"{name}ForSequenceClassification", CLASSIFIER, LAST_TOKEN),
        "token-classifier": Classifier(f"{name}ForTokenClassification", {"head.score": "classifier"}),
    }


class T5Like(Family):
    """Pre-norm with RMS norms, a bias by distance that all layers of a stack share, scores not divided, no biases.

    `encoder` is the class that is an encoder alone.
    """

    encoder: ClassVar[str]
    parts = Family.parts | {
        "position": "t5",
        "attention.scale": 1.0,
        "norm": "rmsnorm",
        "embedding.tied": True,  # in transformers too, unless the file has a head
        "init": "t5",
    }
    shapes = ("encoder-decoder", "encoder")
    fields: ClassVar[dict[str, FieldEntry]] = {
        "vocab_size": Field("vocab_size"),
        "d_model": Field("dim"),
        "d_kv": Field("head_dim"),
        "d_ff": Field("hidden_dim"),
        "num_heads": Field("num_heads"),
        "hidden_size": Pinned(SameAs("dim")),
        "head_dim": Pinned(SameAs("head_dim")),
        "num_attention_heads": Pinned(SameAs("num_heads")),
        # the length of the texts it was trained with; its positions have no end
        "n_positions": Field("max_length", default=512, omitted=True),
        "relative_attention_num_buckets": Field("position.num_buckets", default=32),
        "relative_attention_max_distance": Field("position.max_distance", default=128),
        "dropout_rate": Field(
            "dropout.residual", "dropout.embedding", "dropout.attention", "dropout.feedforward", default=0.1
        ),
        "layer_norm_epsilon": Field("norm.eps", default=1e-6),
    }
    prefix = ""
    embedding = "shared.weight"
    copies = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
    renames: ClassVar[dict[str, str]] = {BODY: ""}
    passthrough = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    unsupported: ClassVar[frozenset[str]] = frozenset({"is_decoder"})
    harmless = frozenset({"classifier_dropout", "initializer_factor", "num_decoder_layers", "output_past"})

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        alone = config.shape == "encoder" and config.head.kind in ("none", "pooled")
        return self.encoder if alone else super().architecture(config, passthrough)

    def written_name(self, name: str, config: ModelConfig) -> str:
        """Classes that classify have the body as a part; the others are the body."""
        inside = isinstance(config.head, ClassifierConfig) and not name.startswith(("classif",))
        return f"{BODY}{name}" if inside else name

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from self.stack("encoder", ("SelfAttention",), config)
        yield from self.stack("decoder", ("SelfAttention", "EncDecAttention"), config)

    def stack(self, side: Side, attentions: tuple[str, ...], config: ModelConfig) -> Iterator[Rule]:
        """One of the two stacks: its attentions stand one after the other in a block, the feed-forward network last."""
        block, layer = f"{side}.blocks.{{i}}", f"{side}.block.{{i}}.layer"
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        yield Rule(f"{side}.positions.0.weight", f"{side}.block.0.{bias}")
        yield Rule(f"{side}.positions.0.weight.{{i}}", f"{side}.block.{{i}}.{bias}")
        yield from linear(f"{side}.norm", f"{side}.final_layer_norm")
        yield from projections(f"{block}.attention", f"{layer}.0.{attentions[0]}", ("q", "k", "v"))
        yield from linear(f"{block}.attention.out", f"{layer}.0.{attentions[0]}.o")
        if len(attentions) > 1:
            yield from cross_projections(f"{block}.cross", f"{layer}.1.{attentions[1]}", ("q", "k", "v"))
            yield from linear(f"{block}.cross.out", f"{layer}.1.{attentions[1]}.o")
        last = len(attentions)
        for index in range(last + 1):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{index}.layer_norm")
        yield from self.network(f"{block}.feedforward", f"{layer}.{last}", config)

    def network(self, ours: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
        """The feed-forward network of a block."""
        dense = f"{theirs}.DenseReluDense"
        if config.feedforward.gated:
            yield from glu(f"{ours}.up", f"{dense}.wi_0", f"{dense}.wi_1")
        else:
            yield from linear(f"{ours}.up", f"{dense}.wi")
        yield from linear(f"{ours}.down", f"{dense}.wo")
