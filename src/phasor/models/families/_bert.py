"""What encoders share with BERT: post-norm blocks with every bias, the names of their tensors, and many fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasor.config import LayerNormConfig, ModelConfig
from phasor.models.family import ACTIVATIONS, Family, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import LearnedConfig

EVERY = ("q", "k", "v", "out")
# Fields of heads for other tasks, of old versions, and of how BERT was once described.
HARMLESS = frozenset(
    """
    classifier_dropout cls_token_id directionality eos_token_ids mask_token_id output_past pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    summary_activation summary_first_dropout summary_last_dropout summary_type summary_use_proj
    """.split()  # noqa: SIM905
)


class BertLike(Family):
    """Names as in BERT.

    `masked` begins the names of the masked-language-model head, `transform` are its dense layer and norm. The bias
    of its logits stands under two names. One is used where the head is tied, as a rule the only one in the file;
    the other where it is not, and then the first is of no use.
    """

    masked: ClassVar[str] = "cls.predictions"
    transform: ClassVar[tuple[str, str]] = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
    head_activation: ClassVar[str | None] = None  # where it is not the blocks' own
    has_pooler: ClassVar[bool] = True
    harmless = HARMLESS
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"add_cross_attention", "is_decoder"}
    )  # what makes a decoder of it
    renames = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    derived: ClassVar[tuple[str, ...]] = ("*.embeddings.position_ids", "*.embeddings.token_type_ids")

    def read(self, f: Fields) -> ModelConfig:
        kind = self.head_kind(f)
        activation = f.choose("hidden_act", ACTIVATIONS, "gelu")
        head: dict[str, Any] = {"kind": kind, "pooler": self.pooler(f, kind)}
        if kind == "mlm":
            head["activation"] = self.head_activation or activation
        dropout = f.get("hidden_dropout_prob", 0.1)
        sizes: dict[str, Any] = {
            "shape": "encoder",
            "vocab_size": f.get("vocab_size"),
            "dim": f.get("hidden_size"),
            "hidden_dim": f.get("intermediate_size"),
            "num_layers": f.get("num_hidden_layers"),
            "num_heads": f.get("num_attention_heads"),
            "attention": {"bias": EVERY},
            "feedforward": {"activation": activation, "bias": True},
            "norm": LayerNormConfig(eps=f.get("layer_norm_eps", 1e-12)),
            "placement": "post",
            "embedding": self.read_embedding(f),
            "head": head,
            "dropout": {
                "embedding": dropout,
                "residual": dropout,
                "attention": f.get("attention_probs_dropout_prob", 0.1),
            },
            "init": {"kind": "normal", "std": f.get("initializer_range", 0.02)},
        }
        return ModelConfig(**sizes, **self.read_positions(f))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        norm = require_kind(config.norm, LayerNormConfig)
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "hidden_act": activation_name(config.feedforward.activation),
            "hidden_dropout_prob": config.dropout.residual,
            "attention_probs_dropout_prob": config.dropout.attention,
            "layer_norm_eps": norm.eps,
            "initializer_range": getattr(config.init, "std", 0.02),
            **self.write_embedding(config),
            **self.write_positions(config),
        }

    def read_embedding(self, f: Fields) -> dict[str, Any]:
        """The first layer."""
        return {"norm": True, "token_types": f.get("type_vocab_size", 2), "tied": f.get("tie_word_embeddings", True)}

    def write_embedding(self, config: ModelConfig) -> dict[str, Any]:
        """The fields `read_embedding` reads."""
        if not config.embedding.token_types:
            raise ValueError(f"{self.model_type} always has token types")
        return {"type_vocab_size": config.embedding.token_types}

    def read_positions(self, f: Fields) -> dict[str, Any]:
        """A learned table and its length."""
        f.expect("position_embedding_type", "absolute")
        return {"position": "learned", "max_length": f.get("max_position_embeddings", 512)}

    def write_positions(self, config: ModelConfig) -> dict[str, Any]:
        """The fields `read_positions` reads."""
        require_kind(config.position, LearnedConfig)
        return {"max_position_embeddings": config.input_position.max_positions}

    def head_kind(self, f: Fields) -> str:
        """As the architecture has it; where none is named, as the tensors have it."""
        if not f.get("architectures", None) and f.tensors:
            return "mlm" if f"{self.transform[0]}.weight" in f.tensors else "none"
        return super().head_kind(f)

    def pooler(self, f: Fields, kind: str) -> str:
        """BERT's pooler where the file has it; without a file, where the class has it."""
        if not self.has_pooler:
            return "none"
        found = f"{self.prefix}pooler.dense.weight" in f.tensors if f.tensors else kind == "none"
        return "first" if found else "none"

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        poolers = (f"{self.prefix}pooler.*",)
        if not config.has_logits:
            return (*poolers, *self.passthrough, *(f"{beginning}*" for beginning in self.unprefixed))
        return (*poolers, *self.passthrough, *(() if config.embedding.tied else (f"{self.masked}.bias",)))

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """Stored positions count from 0, and stored token types are 0."""
        counts = torch.arange(tensor.shape[-1]) * int(name.endswith("position_ids"))
        return torch.equal(tensor.flatten().long(), counts)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        first, block, layer = f"{self.prefix}embeddings", "encoder.blocks.{i}", self.prefix + "encoder.layer.{i}"
        yield Rule("tokens.weight", f"{first}.word_embeddings.weight")
        yield Rule("encoder.positions.0.weight", f"{first}.position_embeddings.weight")
        yield Rule("encoder.token_types.weight", f"{first}.token_type_embeddings.weight")
        yield from linear("encoder.embedding_norm", f"{first}.LayerNorm")
        yield from linear("encoder.project", f"{self.prefix}embeddings_project")
        yield from projections(f"{block}.attention", f"{layer}.attention.self", ("query", "key", "value"))
        yield from linear(f"{block}.attention.out", f"{layer}.attention.output.dense")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.attention.output.LayerNorm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.intermediate.dense")
        yield from linear(f"{block}.feedforward.down", f"{layer}.output.dense")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.output.LayerNorm")
        yield from linear("pooler.dense", f"{self.prefix}pooler.dense")
        yield from linear("head.dense", self.transform[0])
        yield from linear("head.norm", self.transform[1])
        yield Rule("head.weight", f"{self.masked}.decoder.weight")
        yield Rule("head.bias", f"{self.masked}.bias" if config.embedding.tied else f"{self.masked}.decoder.bias")
