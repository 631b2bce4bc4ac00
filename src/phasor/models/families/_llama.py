"""What most decoders share with Llama: the names of their tensors, and many fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.config.parts import Projection
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, glu, linear, projections

PRE = ("input_layernorm", "post_attention_layernorm")
EVERY_BIAS: tuple[Projection, ...] = ("q", "k", "v", "out")


class LlamaLike(Family):
    """Names as in Llama.

    `norms` are those of a block in the order they run, `last_norm` follows the last block. `defaults` says what fields
    mean that a file does not have; `has_head_dim` is false where transformers' configuration takes that field
    without having it.
    """

    norms: tuple[str, ...] = PRE
    last_norm: ClassVar[str] = "norm"
    defaults: ClassVar[dict[str, Any]] = {}
    has_head_dim: ClassVar[bool] = True
    derived = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.*inv_freq")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", "model.embed_tokens.weight")
        yield from linear("head", "lm_head")
        side = "encoder" if config.shape == "encoder" else "decoder"
        yield from linear(f"{side}.norm", f"model.{self.last_norm}")
        block, layer = f"{side}.blocks.{{i}}", "model.layers.{i}"
        yield from self.attention(f"{block}.attention", f"{layer}.self_attn")
        for index, norm in enumerate(self.norms):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        yield from self.feedforward(f"{block}.feedforward", f"{layer}.mlp")

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_norm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.k_norm")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from glu(f"{ours}.up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
        yield from linear(f"{ours}.down", f"{theirs}.down_proj")

    def sizes(self, f: Fields) -> dict[str, Any]:
        """The sizes of a model, and its tie, head kind and attention dropout."""
        f.set_defaults(self.defaults)
        heads = f.get("num_attention_heads")
        return {
            "vocab_size": f.get("vocab_size"),
            "dim": f.get("hidden_size"),
            "hidden_dim": f.get("intermediate_size"),
            "num_layers": f.get("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": f.get("num_key_value_heads", heads),
            "head_dim": f.get("head_dim", None),
            "max_length": f.get("max_position_embeddings", 2048),
            "dropout": {"attention": f.get("attention_dropout", 0.0)},
            "init": {"kind": "normal", "std": f.get("initializer_range", 0.02)},
            "head": {"kind": self.head_kind(f)},
            "embedding": {"tied": f.get("tie_word_embeddings", False)},
        }

    def write_sizes(self, config: ModelConfig) -> dict[str, Any]:
        """The fields `sizes` reads."""
        own_width = self.has_head_dim or config.head_dim * config.num_heads != config.dim
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            **({"head_dim": config.head_dim} if own_width else {}),
            "max_position_embeddings": config.max_length,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
        }


def fused_gate(ours: str, theirs: str) -> Iterator[Rule]:
    """A feed-forward network whose gate and up projection are one tensor, in the order of ours."""
    yield from linear(f"{ours}.up", f"{theirs}.gate_up_proj")
    yield from linear(f"{ours}.down", f"{theirs}.down_proj")
