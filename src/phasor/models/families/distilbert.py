"""DistilBERT: BERT without token types and pooler, under names of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import LayerNormConfig, ModelConfig
from phasor.models.families._bert import EVERY, BertLike
from phasor.models.family import ACTIVATIONS, activation_name
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections


class DistilBert(BertLike):
    """Its norms have a fixed epsilon. A table of sines stands in the file like a learned one."""

    model_type = "distilbert"
    title = "DistilBERT"
    architectures = {"mlm": "DistilBertForMaskedLM", "none": "DistilBertModel"}
    prefix = "distilbert."
    unprefixed = ("vocab_",)
    embedding = "distilbert.embeddings.word_embeddings.weight"
    head = "vocab_projector.weight"
    harmless = frozenset({"output_past", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"})
    unsupported = frozenset()
    transform = ("vocab_transform", "vocab_layer_norm")
    has_pooler = False

    def read(self, f: Fields) -> ModelConfig:
        kind = self.head_kind(f)
        activation = f.choose("activation", ACTIVATIONS, "gelu")
        dropout = f.get("dropout", 0.1)
        sizes: dict[str, Any] = {
            "shape": "encoder",
            "vocab_size": f.get("vocab_size"),
            "dim": f.get("dim", f.get("hidden_size", 768)),
            "hidden_dim": f.get("hidden_dim", 3072),
            "num_layers": f.get("n_layers", f.get("num_hidden_layers", 6)),
            "num_heads": f.get("n_heads", f.get("num_attention_heads", 12)),
            "attention": {"bias": EVERY},
            "feedforward": {"activation": activation, "bias": True},
            "norm": LayerNormConfig(eps=1e-12),
            "placement": "post",
            "embedding": {"norm": True, "tied": f.get("tie_word_embeddings", True)},
            "head": {"kind": kind} | ({"activation": activation} if kind == "mlm" else {}),
            "dropout": {"embedding": dropout, "residual": dropout, "attention": f.get("attention_dropout", 0.1)},
            "init": {"kind": "normal", "std": f.get("initializer_range", 0.02)},
        }
        return ModelConfig(**sizes, **self.read_positions(f))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "vocab_size": config.vocab_size,
            "dim": config.dim,
            "hidden_dim": config.hidden_dim,
            "n_layers": config.num_layers,
            "n_heads": config.num_heads,
            "activation": activation_name(config.feedforward.activation),
            "dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
            **self.write_positions(config),
        }

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
