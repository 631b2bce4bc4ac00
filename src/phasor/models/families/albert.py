"""ALBERT: BERT with a narrower first layer, and layers that share their weights."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Field, Pinned
from phasor.models.families._bert import BertLike, Pretraining, bert_classifiers
from phasor.models.layout import Rule, linear, projections


class Albert(BertLike):
    """Layers in `num_hidden_groups` groups, each of one block. The head that tells the order of sentences is kept."""

    model_type = "albert"
    title = "ALBERT"
    architectures = {"mlm": "AlbertForMaskedLM", "none": "AlbertModel"}
    classifiers = bert_classifiers("Albert", {"head.score": "classifier"})
    sentence_order = ("sop_classifier.classifier.weight", "sop_classifier.classifier.bias")
    pretraining = Pretraining("AlbertForPreTraining", sentence_order)
    aliases = {"AlbertForPreTraining": "mlm"}
    prefix = "albert."
    unprefixed = ("predictions.", "sop_classifier.")
    embedding = "albert.embeddings.word_embeddings.weight"
    head = "predictions.decoder.weight"
    copies = {"predictions.decoder.bias": "predictions.bias", "predictions.bias": "predictions.decoder.bias"}
    masked = "predictions"
    transform = ("predictions.dense", "predictions.LayerNorm")
    pooling = "pooler"
    parts = BertLike.parts | {"embedding.project": "sum"}
    fields = BertLike.fields | {
        "embedding_size": Field("embedding.width", default=128),
        "num_hidden_groups": Field("num_blocks", default=1),
        "inner_group_num": Pinned(1),
        "hidden_act": Activation("gelu_new", ACTIVATIONS, "feedforward.activation", "head.activation"),
        "hidden_dropout_prob": Field("dropout.residual", "dropout.embedding", default=0.0),
        "attention_probs_dropout_prob": Field("dropout.attention", default=0.0),
    }
    unsupported = frozenset()
    # Of other heads, and of the code it was first trained with.
    harmless = BertLike.harmless | {
        "classifier_dropout_prob",
        "down_scale_factor",
        "gap_size",
        "net_structure_type",
        "num_memory_blocks",
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", "albert.encoder.albert_layer_groups.{i}.albert_layers.0"
        yield from self.embedding_rules()
        yield from linear("encoder.embedding_norm", "albert.embeddings.LayerNorm")
        yield from linear("encoder.project", "albert.encoder.embedding_hidden_mapping_in")
        yield from projections(f"{block}.attention", f"{layer}.attention", ("query", "key", "value"))
        yield from linear(f"{block}.attention.out", f"{layer}.attention.dense")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.attention.LayerNorm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.ffn")
        yield from linear(f"{block}.feedforward.down", f"{layer}.ffn_output")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.full_layer_layer_norm")
        yield from linear("pooler.dense", "albert.pooler")
        yield from self.head_rules(config)


FAMILY = Albert()
