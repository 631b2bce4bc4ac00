"""Ministral 3 and other models of Mistral whose queries grow with the position."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.config.positions import PositionConfig
from phasor.models.entries import Draft, Field, require_kind
from phasor.models.families._llama import score_classifiers
from phasor.models.families.mistral import Mistral
from phasor.models.family import ORIGINAL
from phasor.models.fields import Fields
from phasor.models.rope import RopeParameters, parameters
from phasor.nn.positions import CombinedConfig, RotaryConfig, TemperatureConfig

BETA = "llama_4_scaling_beta"
USUAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384}
USUAL |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}


class RotaryWithTemperature(RopeParameters):
    """`rope_parameters` with a temperature that steps up at every multiple of the original length."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        rope = f.inside(parameters(f, None, self.usual or {}), "rope_parameters.")
        beta, length = rope.get(BETA), rope.get(ORIGINAL)
        others = {n: v for n, v in rope.data.items() if n not in (BETA, "max_position_embeddings")}
        if rope.get("rope_type", rope.get("type", "default")) in ("default", "linear"):
            del others[ORIGINAL]  # of the temperature alone
        inner = f.inside(f.data | {"rope_parameters": others, "rope_scaling": None})
        rotary = self.scheme(inner, draft, self.base, self.partial)
        f.taken |= inner.taken
        temperature = TemperatureConfig(form="floor", scale=beta, floor_length=length, first=0) if beta != 0 else None
        draft["position"] = rotary if temperature is None else CombinedConfig(schemes=(rotary, temperature))

    def rotary(self, config: ModelConfig) -> RotaryConfig:
        return self.schemes(config)[0]

    def schemes(self, config: ModelConfig) -> tuple[RotaryConfig, PositionConfig | None]:
        """The rotary scheme, and the temperature where there is one."""
        rotary, *others = config.position.parts
        temperature = others[0] if len(others) == 1 else None
        return require_kind(rotary, RotaryConfig), temperature

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        written, (_, temperature) = super().write(name, config), self.schemes(config)
        fields = {BETA: 0.0, ORIGINAL: config.max_length} | written[name]
        if isinstance(temperature, TemperatureConfig):
            fields |= {BETA: temperature.chosen_scale, ORIGINAL: temperature.floor_length}
        return written | {name: fields}


class Ministral3(Mistral):
    """Mistral with a temperature by position."""

    model_type = "ministral3"
    title = "Ministral 3"
    architectures = {"lm": "Ministral3ForCausalLM", "none": "Ministral3Model"}
    classifiers = score_classifiers("Ministral3")
    first_choice = False
    fields = Mistral.fields | {
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=262144),
        "sliding_window": Field("attention.window", default=None),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RotaryWithTemperature(usual=USUAL),
    }


FAMILY = Ministral3()
