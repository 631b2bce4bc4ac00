"""Falcon: 7B, 40B, 180B, the 11B of Falcon 2, and the RW models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerNormConfig,
    ModelConfig,
    NormalInitConfig,
    ParallelConfig,
    PositionConfig,
    PreConfig,
)
from phasor.models.families._gpt import EVERY, either, plain_head
from phasor.models.families._megatron import block
from phasor.models.family import ACTIVATIONS, Family, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import ALiBiConfig, RotaryConfig


class Falcon(Family):
    """Multi-query, parallel after one norm (7B); grouped heads, one norm or two (40B); ALiBi, sequential (RW)."""

    model_type = "falcon"
    title = "Falcon"
    architectures = {"lm": "FalconForCausalLM", "none": "FalconModel"}
    aliases = {"RWForCausalLM": "lm"}
    prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    harmless = frozenset({"ff_factor"})  # the ratio of two sizes

    def read(self, f: Fields) -> ModelConfig:
        f.expect("apply_residual_connection_post_layernorm", False)
        heads = f.get("num_attention_heads")
        bias, placement = f.get("bias", False), self.placement(f)
        plain = ModelConfig(
            vocab_size=f.get("vocab_size"),
            dim=either(f, "hidden_size", "n_embed"),
            hidden_dim=f.get("ffn_hidden_size", None),
            num_layers=f.get("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=self.num_kv_heads(f, heads),
            max_length=f.get("max_position_embeddings", 2048),
            attention=AttentionConfig(bias=EVERY if bias else ()),
            feedforward=FeedForwardConfig(activation=f.choose("activation", ACTIVATIONS, "gelu"), bias=bias),
            norm=LayerNormConfig(eps=f.get("layer_norm_epsilon", 1e-5)),
            placement=placement,
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", True)),
            head=plain_head(self.head_kind(f)),
            dropout=DropoutConfig(residual=f.get("hidden_dropout", 0.0), attention=f.get("attention_dropout", 0.0)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02)),
        )
        return plain.replace(position=self.position(f, plain))

    def placement(self, f: Fields) -> PreConfig | ParallelConfig:
        """The newer architecture is parallel with one norm or two; the older one parallel with one, or sequential."""
        if f.get("new_decoder_architecture", False):
            f.expect("parallel_attn", True)
            f.expect("num_ln_in_parallel_attn", 2, 1)
            return ParallelConfig(shared_norm=f.get("num_ln_in_parallel_attn", 2) == 1)
        f.expect("num_ln_in_parallel_attn", 1)
        return ParallelConfig() if f.get("parallel_attn", True) else PreConfig()

    def num_kv_heads(self, f: Fields, heads: int) -> int:
        """The newer architecture counts them; the older one has one, or one per query head."""
        several, given = not f.get("multi_query", True), f.get("num_kv_heads", heads)
        if f.get("new_decoder_architecture", False):
            return given
        if several:
            f.expect("num_kv_heads", heads)
        return heads if several else 1

    def position(self, f: Fields, plain: ModelConfig) -> PositionConfig:
        """Rotary, or ALiBi that is divided together with the scores, as in the default attention of transformers."""
        if not f.get("alibi", False):
            return read_rotary(f, plain.head_dim, plain.max_length)
        for unused in ("rope_parameters", "rope_theta", "rope_scaling"):
            f.get(unused, None)
        return ALiBiConfig(multiplier=plain.head_dim**-0.5)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        norm, position, placement = require_kind(config.norm, LayerNormConfig), config.position, config.placement
        fields: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "ffn_hidden_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_length,
            "bias": bool(config.attention.bias),
            "activation": activation_name(config.feedforward.activation),
            "layer_norm_epsilon": norm.eps,
            "hidden_dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
            "alibi": isinstance(position, ALiBiConfig),
            "parallel_attn": isinstance(placement, ParallelConfig),
        }
        if not isinstance(position, ALiBiConfig):
            fields["rope_parameters"] = write_rotary(require_kind(position, RotaryConfig), config)
        groups, two = config.num_kv_heads, isinstance(placement, ParallelConfig) and not placement.shared_norm
        if two or groups not in (1, config.num_heads):
            newer = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}
            return fields | newer | {"num_kv_heads": groups}
        return fields | {"multi_query": groups == 1 and config.num_heads > 1}

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        if not isinstance(config.position, ALiBiConfig):
            return None
        return (
            "transformers rounds ALiBi to bfloat16, and phasor does not: it follows the formula in float32, which the "
            "default attention of transformers (sdpa) comes near to"
        )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.ln_f")
        two = isinstance(config.placement, ParallelConfig) and not config.placement.shared_norm
        norms = ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")
        yield from block("transformer.h.{i}", "self_attention", norms)


FAMILY = Falcon()
