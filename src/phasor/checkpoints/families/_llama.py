"""What most decoders share with Llama: the names of their tensors, and many fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.checkpoints.family import Family
from phasor.checkpoints.fields import Fields
from phasor.checkpoints.layout import Rule, gated, linear, projections
from phasor.config import ModelConfig

PRE = ("input_layernorm", "post_attention_layernorm")


class LlamaLike(Family):
    """Names as in Llama; `norms` are those of a block in the order they run."""

    norms: tuple[str, ...] = PRE
    derived = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.*inv_freq")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", "model.embed_tokens.weight")
        yield Rule("head.weight", "lm_head.weight")
        yield from linear("decoder.norm", "model.norm")
        block, layer = "decoder.blocks.{i}", "model.layers.{i}"
        yield from projections(f"{block}.attention", f"{layer}.self_attn")
        yield from linear(f"{block}.attention.out", f"{layer}.self_attn.o_proj")
        yield from linear(f"{block}.attention.q_norm", f"{layer}.self_attn.q_norm")
        yield from linear(f"{block}.attention.k_norm", f"{layer}.self_attn.k_norm")
        for index, norm in enumerate(self.norms):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        yield from self.feedforward(f"{block}.feedforward", f"{layer}.mlp")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from gated(f"{ours}.up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
        yield from linear(f"{ours}.down", f"{theirs}.down_proj")

    def sizes(self, f: Fields) -> dict[str, Any]:
        """The sizes of a model, and its tie, head kind and attention dropout."""
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
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "intermediate_size": config.feedforward_width,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.key_value_heads,
            "head_dim": config.head_width,
            "max_position_embeddings": config.max_length,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
        }
