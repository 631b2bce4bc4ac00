"""Phi-3, Phi-3.5 and Phi-4: fused projections, and LongRoPE in those that read 128,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._llama import LlamaLike, fused_gate
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import LongRoPE, RotaryConfig


class Phi3(LlamaLike):
    """Llama with queries, keys and values in one tensor, gate and up in another, and perhaps a window.

    The length LongRoPE starts from stands beside its parameters, and goes before one that stands in them.
    """

    model_type = "phi3"
    title = "Phi-3, 3.5, 4"
    architectures = {"lm": "Phi3ForCausalLM", "none": "Phi3Model"}
    defaults = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    has_head_dim = False

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
            f.expect(name, False)
        for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's own code
            f.expect(name, 1)
        position = read_rotary(f, plain.head_dim, plain.max_length, partial=1.0)
        if not isinstance(position.extension, LongRoPE | None):
            raise ValueError(f"{f.file}: the rope_type of phi3 is default or longrope, not {position.extension.kind!r}")
        return plain.replace(
            position=position,
            attention=AttentionConfig(window=f.get("sliding_window", None)),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-5)),
            dropout=plain.dropout.replace(embedding=f.get("embd_pdrop", 0.0), residual=f.get("resid_pdrop", 0.0)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, extension = require_kind(config.position, RotaryConfig), getattr(config.position, "extension", None)
        original = extension.original_length if isinstance(extension, LongRoPE) else config.original_length()
        return self.write_sizes(config) | {
            "sliding_window": config.layer(0).attention.window,
            "hidden_act": activation_name(config.feedforward.activation),
            "rms_norm_eps": require_kind(config.norm, RMSNormConfig).eps,
            "embd_pdrop": config.dropout.embedding,
            "resid_pdrop": config.dropout.residual,
            "original_max_position_embeddings": original,
            "rope_parameters": {"partial_rotary_factor": 1.0} | write_rotary(position, config),
        }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.qkv", f"{theirs}.qkv_proj", Parts("qkv"))
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from fused_gate(ours, theirs)


FAMILY = Phi3()
