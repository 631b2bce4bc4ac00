"""StableLM 3B 4E1T, StableLM 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, LayerNormConfig, ModelConfig, ParallelConfig, PreConfig
from phasor.models.families._llama import LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class StableLM(LlamaLike):
    """Llama with LayerNorm, rotary on a quarter of each head, and perhaps parallel sub-layers and norms on heads."""

    model_type = "stablelm"
    title = "StableLM"
    architectures = {"lm": "StableLmForCausalLM", "none": "StableLmModel"}
    defaults = {"num_key_value_heads": 32, "max_position_embeddings": 4096}
    has_head_dim = False

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        f.expect("head_dim", plain.dim // plain.num_heads)
        f.expect("hidden_dropout", 0.0)  # on the feed-forward network alone
        normed = f.get("qk_layernorm", False)
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, partial=0.25),
            attention=AttentionConfig(
                bias=("q", "k", "v") if f.get("use_qkv_bias", False) else (),
                qk_norm="heads" if normed else "none",
                qk_norm_bias=not normed,
            ),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=LayerNormConfig(eps=f.get("layer_norm_eps", 1e-5)),
            placement=ParallelConfig() if f.get("use_parallel_residual", False) else PreConfig(),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, LayerNormConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "use_qkv_bias": bool(config.attention.bias),
            "qk_layernorm": config.attention.qk_norm != "none",
            "layer_norm_eps": norm.eps,
            "rope_parameters": {"partial_rotary_factor": 1.0} | write_rotary(position, config),
            "use_parallel_residual": isinstance(config.placement, ParallelConfig),
        }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")
        for part in "qk":
            yield Rule(f"{ours}.{part}_norm.weight", f"{theirs}.{part}_layernorm.norms.{{e}}.weight")


FAMILY = StableLM()
