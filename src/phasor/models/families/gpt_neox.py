"""GPT-NeoX 20B, Pythia, Dolly, RedPajama."""

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
    PreConfig,
)
from phasor.models.families._gpt import EVERY, plain_head
from phasor.models.families._megatron import block
from phasor.models.family import ACTIVATIONS, Family, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class GPTNeoX(Family):
    """Parallel with a norm each, or pre-norm; rotary on part of a head, biases everywhere."""

    model_type = "gpt_neox"
    title = "GPT-NeoX, Pythia"
    architectures = {"lm": "GPTNeoXForCausalLM", "none": "GPTNeoXModel"}
    prefix = "gpt_neox."
    embedding = "gpt_neox.embed_in.weight"
    harmless = frozenset({"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"})
    renames = {"embed_out.": "lm_head."}
    derived = (
        *("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    )

    def read(self, f: Fields) -> ModelConfig:
        dropped = f.get("hidden_dropout", 0.0)
        plain = ModelConfig(
            vocab_size=f.get("vocab_size"),
            dim=f.get("hidden_size"),
            hidden_dim=f.get("intermediate_size"),
            num_layers=f.get("num_hidden_layers"),
            num_heads=f.get("num_attention_heads"),
            max_length=f.get("max_position_embeddings", 2048),
            attention=AttentionConfig(bias=EVERY if f.get("attention_bias", True) else ()),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", ACTIVATIONS, "gelu"), bias=True),
            norm=LayerNormConfig(eps=f.get("layer_norm_eps", 1e-5)),
            placement=ParallelConfig(shared_norm=False) if f.get("use_parallel_residual", True) else PreConfig(),
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", False)),
            head=plain_head(self.head_kind(f)),
            dropout=DropoutConfig(embedding=dropped, residual=dropped, attention=f.get("attention_dropout", 0.0)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02)),
        )
        base, share = f.get("rotary_emb_base", 10000.0), f.get("rotary_pct", 0.25)
        return plain.replace(position=read_rotary(f, plain.head_dim, plain.max_length, base=base, partial=share))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, LayerNormConfig)
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_length,
            "attention_bias": bool(config.attention.bias),
            "hidden_act": activation_name(config.feedforward.activation),
            "layer_norm_eps": norm.eps,
            "use_parallel_residual": isinstance(config.placement, ParallelConfig),
            "hidden_dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
            "rope_parameters": {"partial_rotary_factor": 1.0} | write_rotary(position, config),
        }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "gpt_neox.final_layer_norm")
        yield from block("gpt_neox.layers.{i}", "attention", ("input_layernorm", "post_attention_layernorm"))


FAMILY = GPTNeoX()
