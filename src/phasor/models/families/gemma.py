"""Gemma 1 and the models that took over its shape (CodeGemma)."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.families._gemma import GemmaLike
from phasor.models.family import GATES, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Gemma(GemmaLike):
    """Llama's shape with wide heads; "gelu" in its files always meant the tanh approximation."""

    model_type = "gemma"
    title = "Gemma"
    architectures = {"lm": "GemmaForCausalLM", "none": "GemmaModel"}
    defaults = {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    activation = "hidden_act"
    gates = GATES | {"gelu": "geglu-tanh"}

    def read(self, f: Fields) -> ModelConfig:
        config = self.read_shared(f)
        if f.choose("hidden_activation", self.gates, f.get("hidden_act", "gelu")) != config.feedforward.activation.kind:
            raise ValueError(f"{f.file}: hidden_act and hidden_activation name different activations")
        f.expect("use_bidirectional_attention", False)
        return config.replace(position=read_rotary(f, config.head_dim, config.max_length))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        return self.write_shared(config) | {"rope_parameters": write_rotary(position, config)}


FAMILY = Gemma()
