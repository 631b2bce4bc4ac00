"""ModernBERT: a pre-norm encoder with rotary positions, local and global layers."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import (
    ACTIVATIONS,
    GATES,
    Activation,
    Bias,
    ClassifierPooling,
    Field,
    InitStd,
    Pinned,
    SameAs,
)
from phasor.models.family import Classifier, Family
from phasor.models.layer_types import FULL, SLIDING, LayerTypes
from phasor.models.layout import Parts, Rule, linear
from phasor.models.rope import RopeParametersByLayer

TRANSFORM = {"head.dense": "gelu", "head.dense_norm": True}
CLASSIFIER = {"head.dense": "head.dense", "head.norm": "head.norm", "head.score": "classifier"}


class ModernBert(Family):
    """GeGLU, an embedding norm in place of the first block's own, and two sets of rotary frequencies.

    `local_attention` counts the tokens a local layer sees on both sides.
    """

    model_type = "modernbert"
    title = "ModernBERT"
    architectures = {"mlm": "ModernBertForMaskedLM", "none": "ModernBertModel"}
    classifiers = {
        "sequence-classifier": Classifier("ModernBertForSequenceClassification", CLASSIFIER, TRANSFORM),
        "token-classifier": Classifier("ModernBertForTokenClassification", CLASSIFIER, TRANSFORM),
    }
    unprefixed = ("head.", "decoder.")
    embedding = "model.embeddings.tok_embeddings.weight"
    head = "decoder.weight"
    shapes = ("encoder",)
    parts = Family.parts | {
        "norm": "layernorm",
        "placement": "pre",
        "placement.first_norm": False,
        "embedding.norm": True,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "head_dim": Pinned(SameAs("head_dim")),
        "max_position_embeddings": Field("max_length", default=8192),
        "hidden_activation": Activation("gelu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "norm_eps": Field("norm.eps", default=1e-5),
        "norm_bias": Field("norm.bias", default=False),
        "embedding_dropout": Field("dropout.embedding", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "mlp_dropout": Field("dropout.feedforward", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "classifier_activation": Activation("gelu", ACTIVATIONS, "head.activation", "head.dense"),
        "decoder_bias": Field("head.bias", default=True),
        "classifier_bias": Field("head.dense_bias", default=False),
        "classifier_pooling": ClassifierPooling("cls", {"cls": "cls", "mean": "mean"}),
        "layer_types": LayerTypes(
            lambda f, draft, i: i % f.positive("global_attn_every_n_layers", 3) != 0,
            window="local_attention",
            default=128,
            absent=128,
        ),
        "rope_theta": Pinned(None),
        "rope_parameters": RopeParametersByLayer(
            {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}, scaled=(FULL, SLIDING)
        ),
    }
    # Of training, of other heads, of fast code, and what other encoders have in these places.
    harmless = frozenset(
        """
        classifier_dropout cls_token_id deterministic_flash_attn initializer_cutoff_factor
        layer_norm_eps position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index
        sparse_prediction
        """.split()  # noqa: SIM905
    )

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        return () if config.has_logits else ("head.*", "decoder.*")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", "model.layers.{i}"
        yield Rule("tokens.weight", "model.embeddings.tok_embeddings.weight")
        yield from linear("encoder.embedding_norm", "model.embeddings.norm")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.Wqkv", Parts("qkv"))
        yield from linear(f"{block}.attention.out", f"{layer}.attn.Wo")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.attn_norm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.Wi")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.Wo")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.mlp_norm")
        yield from linear("encoder.norm", "model.final_norm")
        yield from linear("head.dense", "head.dense")
        yield from linear("head.norm", "head.norm")
        yield from linear("head", "decoder")


FAMILY = ModernBert()
