"""Gemma 3, its text models: norms on queries and keys, and rotary positions of their own in local layers."""

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
from phasor.models.rope import read_rotary_by_layer, write_rotary
from phasor.nn.positions import RotaryConfig


class Gemma3(GemmaLike):
    """A decoder, or with `use_bidirectional_attention` an encoder (EmbeddingGemma)."""

    model_type = "gemma3_text"
    title = "Gemma 3 (text)"
    architectures = {"lm": "Gemma3ForCausalLM", "none": "Gemma3TextModel"}
    norms = AROUND
    defaults = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    }
    harmless = frozenset({"_sliding_window_pattern", "cache_implementation", "final_logit_softcapping", "hidden_act"})

    def read(self, f: Fields) -> ModelConfig:
        config = read_softcap(f, self.read_shared(f))
        f.expect("attn_logit_softcapping", None)
        both_ways = f.get("use_bidirectional_attention", False)
        every = f.positive("sliding_window_pattern", 6)
        kinds = read_types(f, [SLIDING if (i + 1) % every else FULL for i in range(config.num_layers)])
        window = f.get("sliding_window", None)
        if both_ways and isinstance(window, int):  # theirs is the width of both sides
            window = window // 2 + 1
        windows = windows_of(f, kinds, window)
        own = config.attention.replace(scale=read_scale(f), qk_norm="head")
        positions = self.positions(f, config)
        config = config.replace(
            shape="encoder" if both_ways else "decoder",
            position=positions[FULL],
            attention=own,
            placement=SandwichConfig(),
        )
        return vary_layers(
            config,
            position=[positions[kind] for kind in kinds],
            attention=[own.replace(window=window) for window in windows],
        )

    def positions(self, f: Fields, config: ModelConfig) -> dict[str, RotaryConfig]:
        """The rotary scheme of each layer type; older files scale the full layers alone, with a base for each."""
        bases = {FULL: f.get("rope_theta", 1e6), SLIDING: f.get("rope_local_base_freq", 1e4)}
        return read_rotary_by_layer(f, config.head_dim, config.max_length, bases, scaled=(FULL,))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        layers = [config.layer(i) for i in range(config.num_layers)]
        local = next((layer.position for layer in layers if layer.attention.window is not None), RotaryConfig())
        schemes = {FULL: config.position, SLIDING: local}
        fields = self.write_shared(config) | write_scale(config) | write_softcap(config) | write_types(config)
        fields["rope_parameters"] = {k: write_rotary(require_kind(p, RotaryConfig), config) for k, p in schemes.items()}
        both_ways = config.shape == "encoder"
        if both_ways and "sliding_window" in fields:
            fields["sliding_window"] = 2 * (fields["sliding_window"] - 1)
        return fields | {"use_bidirectional_attention": both_ways}


FAMILY = Gemma3()
