"""DistilBERT: BERT without token types and pooler, under other names."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Field, InitStd, Pinned, TableLength
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.layout import Rule, linear, projections


class DistilBert(BertLike):
    """Its norms have a fixed epsilon. A table of sines stands in the file like a learned one."""

    model_type = "distilbert"
    title = "DistilBERT"
    architectures = {"mlm": "DistilBertForMaskedLM", "none": "DistilBertModel"}
    classifiers = bert_classifiers(
        "DistilBert", {"head.dense": "pre_classifier", "head.score": "classifier"}, pooler="cls", dense="relu"
    )
    prefix = "distilbert."
    unprefixed = ("vocab_",)
    embedding = "distilbert.embeddings.word_embeddings.weight"
    head = "vocab_projector.weight"
    parts = BertLike.parts | {"norm.eps": 1e-12}
    fields = {
        "vocab_size": Field("vocab_size"),
        "dim": Field("dim", default=768, fallback="hidden_size"),
        "hidden_dim": Field("hidden_dim", default=3072),
        "n_layers": Field("num_layers", default=6, fallback="num_hidden_layers"),
        "n_heads": Field("num_heads", default=12, fallback="num_attention_heads"),
        "max_position_embeddings": TableLength(default=512),
        "position_embedding_type": Pinned("absolute"),
        "activation": Activation("gelu", ACTIVATIONS, "feedforward.activation", "head.activation"),
        "dropout": Field("dropout.residual", "dropout.embedding", default=0.1),
        "attention_dropout": Field("dropout.attention", default=0.1),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = frozenset({"output_past", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"})
    unsupported = frozenset()
    transform = ("vocab_transform", "vocab_layer_norm")
    has_pooler = False

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        return () if config.has_logits else ("vocab_*",)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        first, block, layer = "distilbert.embeddings", "encoder.blocks.{i}", "distilbert.transformer.layer.{i}"
        yield Rule("tokens.weight", f"{first}.word_embeddings.weight")
        yield Rule("encoder.positions.0.weight", f"{first}.position_embeddings.weight")
        yield from linear("encoder.embedding_norm", f"{first}.LayerNorm")
        yield from projections(f"{block}.attention", f"{layer}.attention", ("q_lin", "k_lin", "v_lin"))
        yield from linear(f"{block}.attention.out", f"{layer}.attention.out_lin")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.sa_layer_norm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.ffn.lin1")
        yield from linear(f"{block}.feedforward.down", f"{layer}.ffn.lin2")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.output_layer_norm")
        yield from linear("head.dense", "vocab_transform")
        yield from linear("head.norm", "vocab_layer_norm")
        yield from linear("head", "vocab_projector")


FAMILY = DistilBert()
