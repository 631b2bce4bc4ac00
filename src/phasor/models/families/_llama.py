"""What most decoders share with Llama: the names of their tensors, and many fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import Field, FieldEntry, InitStd, SameAs
from phasor.models.family import Classifier, Family
from phasor.models.fields import REQUIRED
from phasor.models.layout import Rule, glu, linear, projections

PRE = ("input_layernorm", "post_attention_layernorm")


def score_classifiers(name: str, *, tokens: bool = True) -> dict[str, Classifier]:
    """The classes that classify, whose names begin so: scores of the last token, and where it has both of every one."""
    last = {"head.pooler": "last", "head.score_bias": False}
    found = {"sequence-classifier": Classifier(f"{name}ForSequenceClassification", {"head.score": "score"}, last)}
    if tokens:
        found["token-classifier"] = Classifier(f"{name}ForTokenClassification", {"head.score": "score"})
    return found


class KVHeads(Field):
    """As many key/value heads as query heads where the file has null, and `absent` where it has no field."""

    def __init__(self, absent: Any = REQUIRED) -> None:
        super().__init__("num_kv_heads", default=SameAs("num_heads"), absent=absent)


class LlamaLike(Family):
    """Names as in Llama; `norms` are those of a block in the order they run, `last_norm` follows the last block."""

    fields: ClassVar[dict[str, FieldEntry]] = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "num_key_value_heads": KVHeads(),
        "head_dim": Field("head_dim", default=None),
        "max_position_embeddings": Field("max_length", default=2048),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=False),
    }
    norms: tuple[str, ...] = PRE
    last_norm: ClassVar[str] = "norm"
    derived = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.*inv_freq")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", "model.embed_tokens.weight")
        yield from linear("head", "lm_head")
        side = "encoder" if config.shape == "encoder" else "decoder"
        yield from linear(f"{side}.norm", f"model.{self.last_norm}")
        block, layer = f"{side}.blocks.{{i}}", "model.layers.{i}"
        yield from self.attention(f"{block}.attention", f"{layer}.self_attn")
        for index, norm in enumerate(self.norms_of(config)):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        yield from self.feedforward(f"{block}.feedforward", f"{layer}.mlp")

    def norms_of(self, config: ModelConfig) -> tuple[str, ...]:
        """The norms of a block of this model."""
        return self.norms

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_norm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.k_norm")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from glu(f"{ours}.up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
        yield from linear(f"{ours}.down", f"{theirs}.down_proj")


def fused_gate(ours: str, theirs: str) -> Iterator[Rule]:
    """A feed-forward network whose gate and up projection are one tensor, in the order of ours."""
    yield from linear(f"{ours}.up", f"{theirs}.gate_up_proj")
    yield from linear(f"{ours}.down", f"{theirs}.down_proj")


def plain_network(ours: str, theirs: str) -> Iterator[Rule]:
    """A feed-forward network without a gate."""
    yield from linear(f"{ours}.up", f"{theirs}.up_proj")
    yield from linear(f"{ours}.down", f"{theirs}.down_proj")
