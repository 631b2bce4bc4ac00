"""Gemma 2: soft-caps, norms on both sides, every second layer local."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig, SandwichConfig
from phasor.models.families._gemma import (
    AROUND,
    GemmaLike,
    read_scale,
    read_softcap,
    write_scale,
    write_softcap,
)
from phasor.models.families._layers import FULL, SLIDING, read_types, vary_layers, windows_of, write_types
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Gemma2(GemmaLike):
    """The scores' scale is a field of its own; a soft-cap of null is none, one left out is the usual."""

    model_type = "gemma2"
    title = "Gemma 2"
    architectures = {"lm": "Gemma2ForCausalLM", "none": "Gemma2Model"}
    norms = AROUND
    defaults = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    # older files repeat hidden_activation and sliding_window under names nothing reads
    harmless = frozenset({"cache_implementation", "final_logit_softcapping", "hidden_act", "sliding_window_size"})

    def read(self, f: Fields) -> ModelConfig:
        config = read_softcap(f, self.read_shared(f))
        f.expect("use_bidirectional_attention", False)
        own = config.attention.replace(scale=read_scale(f), softcap=f.get("attn_logit_softcapping", None))
        kinds = read_types(f, [FULL if i % 2 else SLIDING for i in range(config.num_layers)])
        windows = windows_of(f, kinds, f.get("sliding_window", None))
        config = config.replace(
            position=read_rotary(f, config.head_dim, config.max_length), attention=own, placement=SandwichConfig()
        )
        return vary_layers(config, attention=[own.replace(window=window) for window in windows])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        return (
            self.write_shared(config)
            | write_scale(config)
            | write_softcap(config)
            | write_types(config)
            | {
                "attn_logit_softcapping": config.layer(0).attention.softcap,
                "rope_parameters": write_rotary(position, config),
            }
        )


FAMILY = Gemma2()
