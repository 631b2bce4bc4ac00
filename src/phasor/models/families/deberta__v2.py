"""DeBERTa v2 and v3: BERT with disentangled attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import LayerConfig, ModelConfig, SequenceClassifierConfig
from phasor.models.entries import (
    ACTIVATIONS,
    Activation,
    Draft,
    Field,
    FieldEntry,
    Pinned,
    SameAs,
    TableLength,
    require_kind,
)
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import DisentangledConfig

TERMS = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}  # and what projects the vectors that each multiplies with


class RelativeAttention(FieldEntry):
    """Disentangled attention in every layer; with `position_biased_input` a table of positions on the input too."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if not f.flag(name, False):
            raise ValueError(f"{f.file}: phasor does not honor {name} = false; it must be true")
        words = f.raw("pos_att_type", ())
        terms = [word.strip() for word in words.lower().split("|")] if isinstance(words, str) else words
        if not isinstance(terms, list) or not terms or any(term not in [*TERMS] for term in terms):
            raise ValueError(f"{f.file}: pos_att_type must list c2p, p2c or both, not {json_repr(words)}")
        buckets, reach = f.get("position_buckets", -1), f.get("max_relative_positions", -1)
        scheme = DisentangledConfig(
            position_buckets=buckets if buckets > 0 else None,
            max_relative_positions=reach if reach > 0 else draft["max_length"],
            pos_att_type=tuple(terms),
            share_att_key=f.get("share_att_key", False),
            norm_rel_ebd="layer_norm" in [word.strip() for word in f.get("norm_rel_ebd", "none").lower().split("|")],
            norm_eps=draft["norm.eps"],
        )
        if f.get("position_biased_input", True):
            draft.values |= {"position": "learned", "layers": (LayerConfig(position=scheme),)}
        else:
            draft["position"] = scheme

    def check(self, config: ModelConfig) -> None:
        for position in config.layer_positions():
            require_kind(position, DisentangledConfig)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        scheme = require_kind(config.layer_positions()[0], DisentangledConfig)
        longest = config.input_position.max_positions or config.max_length
        reach = scheme.max_relative_positions
        return {
            name: True,
            "pos_att_type": list(scheme.pos_att_type),
            "position_buckets": scheme.position_buckets or -1,
            "max_relative_positions": -1 if reach == longest else reach,
            "share_att_key": scheme.share_att_key,
            "norm_rel_ebd": "layer_norm" if scheme.norm_rel_ebd else "none",
            "position_biased_input": config.position != scheme,
        }


class LongestText(TableLength):
    """The length of the table of positions; without one, of the texts it was trained with."""

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return config.input_position.max_positions or value


class PoolerActivation(Activation):
    """The activation behind the dense layer of a sequence classifier."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if issubclass(draft.head, SequenceClassifierConfig):
            super().read(f, name, draft)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return super().write(name, config) if isinstance(config.head, SequenceClassifierConfig) else {}


class MaskedHead(Pinned):
    """What is expected where there are logits."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if draft.has_logits:
            super().read(f, name, draft)


class DebertaV2(BertLike):
    """The head that files of v3 have for pretraining is kept and not used, as in transformers."""

    model_type = "deberta-v2"
    title = "DeBERTa v2, v3"
    architectures = {"mlm": "DebertaV2ForMaskedLM", "none": "DebertaV2Model"}
    classifiers = bert_classifiers(
        "DebertaV2", {"head.dense": "pooler.dense", "head.score": "classifier"}, pooler="cls", dense="gelu"
    )
    prefix = "deberta."
    unprefixed = ("cls.", "lm_predictions.", "mask_predictions.", "pooler.")
    embedding = "deberta.embeddings.word_embeddings.weight"
    head = "cls.predictions.decoder.weight"
    copies = {
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    }
    passthrough = ("lm_predictions.*", "mask_predictions.*", "deberta.embeddings.position_embeddings.weight")
    has_pooler = False
    parts = {path: part for path, part in BertLike.parts.items() if path != "position"}
    fields = {name: entry for name, entry in BertLike.fields.items() if name != "position_embedding_type"} | {
        "max_position_embeddings": LongestText(default=512),
        "type_vocab_size": Field("embedding.token_types", default=0),
        "layer_norm_eps": Field("norm.eps", default=1e-7),
        "embedding_size": Pinned(SameAs("dim")),
        "attention_head_size": Pinned(SameAs("head_dim")),
        "pooler_hidden_size": Pinned(SameAs("dim")),
        "pooler_hidden_act": PoolerActivation("gelu", ACTIVATIONS, "head.dense"),
        "legacy": MaskedHead(True),
        "relative_attention": RelativeAttention(),
    }
    harmless = BertLike.harmless | {"cls_dropout", "conv_act", "conv_groups", "padding_idx", "pooler_dropout"}
    unsupported = frozenset({"conv_kernel_size"})

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        scheme = require_kind(config.layer_positions()[0], DisentangledConfig)
        ours = f"encoder.positions.{int(config.position != scheme)}"
        yield Rule(f"{ours}.table", "deberta.encoder.rel_embeddings.weight")
        yield from linear(f"{ours}.norm", "deberta.encoder.LayerNorm")
        terms = scheme.pos_att_type
        for index in range(config.num_layers * len(terms)):
            layer, term = divmod(index, len(terms))
            theirs = f"deberta.encoder.layer.{layer}.attention.self.{TERMS[terms[term]]}"
            yield Rule(f"{ours}.weight.{index}", f"{theirs}.weight")
            yield Rule(f"{ours}.bias.{index}", f"{theirs}.bias")

    def attention_rules(self, ours: str, theirs: str) -> Iterator[Rule]:
        names = ("query_proj", "key_proj", "value_proj")
        yield from projections(f"{ours}.attention", f"{theirs}.attention.self", names)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear(f"{ours}.residual.norms.0", f"{theirs}.attention.output.LayerNorm")


FAMILY = DebertaV2()
