"""What encoders share with BERT: post-norm blocks with every bias, the names of their tensors, and many fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import (
    ACTIVATIONS,
    ALL_PROJECTIONS,
    Activation,
    Draft,
    Field,
    FieldEntry,
    InitStd,
    Pinned,
    TableLength,
)
from phasor.models.family import Classifier, Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections

# Fields of heads for other tasks, of old versions, and of how BERT was once described.
HARMLESS = frozenset(
    """
    classifier_dropout cls_token_id directionality eos_token_ids mask_token_id output_past pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    summary_activation summary_first_dropout summary_last_dropout summary_type summary_use_proj
    """.split()  # noqa: SIM905
)


def bert_classifiers(name: str, modules: dict[str, str], **parts: Any) -> dict[str, Classifier]:
    """The classes that classify, whose names begin so: sequences by these modules and parts, and tokens."""
    of_head = {f"head.{field}": part for field, part in parts.items()}
    return {
        "sequence-classifier": Classifier(f"{name}ForSequenceClassification", modules, of_head),
        "token-classifier": Classifier(f"{name}ForTokenClassification", {"head.score": "classifier"}),
    }


class TokenTypes(Field):
    """The number of token types, of which there is at least one."""

    def encode(self, value: Any, config: ModelConfig) -> Any:
        if not value:
            raise ValueError("it always has token types")
        return value


class Pretraining(NamedTuple):
    """A class with both heads of pretraining, and the tensors of the one that phasor has no use for."""

    architecture: str
    tensors: tuple[str, ...]


class BertLike(Family):
    """Names as in BERT.

    `pooling` is the dense layer of the pooler, and `pretraining` the class with a second head, if there is one.
    `masked` begins the names of the masked-language-model head, `transform` are its dense layer and norm. The bias
    of its logits stands under two names. One is used where the head is tied, as a rule the only one in the file;
    the other where it is not, and then the first is of no use.
    """

    masked: ClassVar[str] = "cls.predictions"
    transform: ClassVar[tuple[str, str]] = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
    pooling: ClassVar[str] = "pooler.dense"
    has_pooler: ClassVar[bool] = True
    pretraining: ClassVar[Pretraining | None] = None
    shapes = ("encoder",)
    parts = Family.parts | {
        "position": "learned",
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.bias": True,
        "norm": "layernorm",
        "placement": "post",
        "embedding.norm": True,
    }
    fields: ClassVar[dict[str, FieldEntry]] = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": TableLength(default=512),
        "position_embedding_type": Pinned("absolute"),
        "type_vocab_size": TokenTypes("embedding.token_types", default=2),
        "hidden_act": Activation("gelu", ACTIVATIONS, "feedforward.activation", "head.activation"),
        "hidden_dropout_prob": Field("dropout.residual", "dropout.embedding", default=0.1),
        "attention_probs_dropout_prob": Field("dropout.attention", default=0.1),
        "layer_norm_eps": Field("norm.eps", default=1e-12),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = HARMLESS
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"add_cross_attention", "is_decoder"}
    )  # what makes a decoder of it
    renames = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    derived: ClassVar[tuple[str, ...]] = ("*.embeddings.position_ids", "*.embeddings.token_type_ids")

    def start(self, f: Fields) -> Draft:
        draft = super().start(f)
        if draft["head"] not in self.classifiers:
            draft["head.pooler"] = self.pooler(f, draft["head"])
        return draft

    def head_kind(self, f: Fields) -> str:
        """As the architecture has it; where none is named, as the tensors have it."""
        if not f.get("architectures", None) and f.tensors:
            return "mlm" if f"{self.transform[0]}.weight" in f.tensors else "none"
        return super().head_kind(f)

    def pooler(self, f: Fields, kind: str) -> str:
        """BERT's pooler where the file has it; without a file, where the class has it."""
        if not self.has_pooler:
            return "none"
        both = self.pretraining is not None and f.get("architectures", None) == [self.pretraining.architecture]
        found = f"{self.prefix}{self.pooling}.weight" in f.tensors if f.tensors else both or kind == "none"
        return "first" if found else "none"

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        """With both heads of pretraining if the file has both: transformers would draw a missing one at random."""
        both = self.pretraining is not None and config.head.kind == "mlm" and config.head.pooler == "first"
        if self.pretraining is not None and both and set(self.pretraining.tensors) <= set(passthrough):
            return self.pretraining.architecture
        return super().architecture(config, passthrough)

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        poolers = (f"{self.prefix}pooler.*", *(self.pretraining.tensors if self.pretraining else ()))
        if not config.has_logits:
            return (*poolers, *self.passthrough, *(f"{beginning}*" for beginning in self.unprefixed))
        return (*poolers, *self.passthrough, *(() if config.embedding.tied else (f"{self.masked}.bias",)))

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """Stored positions count from 0, and stored token types are 0."""
        counts = torch.arange(tensor.shape[-1]) * int(name.endswith("position_ids"))
        return torch.equal(tensor.flatten().long(), counts)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", self.prefix + "encoder.layer.{i}"
        yield from self.embedding_rules()
        yield from linear("encoder.embedding_norm", f"{self.prefix}embeddings.LayerNorm")
        yield from linear("encoder.project", f"{self.prefix}embeddings_project")
        yield from self.attention_rules(block, layer)
        yield from linear(f"{block}.feedforward.up", f"{layer}.intermediate.dense")
        yield from linear(f"{block}.feedforward.down", f"{layer}.output.dense")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.output.LayerNorm")
        yield from linear("pooler.dense", f"{self.prefix}{self.pooling}")
        yield from self.head_rules(config)

    def embedding_rules(self) -> Iterator[Rule]:
        first = f"{self.prefix}embeddings"
        yield Rule("tokens.weight", f"{first}.word_embeddings.weight")
        yield Rule("encoder.positions.0.weight", f"{first}.position_embeddings.weight")
        yield Rule("encoder.token_types.weight", f"{first}.token_type_embeddings.weight")

    def attention_rules(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(f"{ours}.attention", f"{theirs}.attention.self", ("query", "key", "value"))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear(f"{ours}.residual.norms.0", f"{theirs}.attention.output.LayerNorm")

    def head_rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from linear("head.dense", self.transform[0])
        yield from linear("head.norm", self.transform[1])
        yield Rule("head.weight", f"{self.masked}.decoder.weight")
        yield Rule("head.bias", f"{self.masked}.bias" if config.embedding.tied else f"{self.masked}.decoder.bias")
