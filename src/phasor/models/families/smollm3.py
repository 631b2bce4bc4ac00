"""SmolLM3."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Draft, Field, FieldEntry, HeadDim
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters
from phasor.nn.positions import NoPositionConfig, RotaryConfig


class RotaryLayers(FieldEntry):
    """Which layers have rotary positions: contrary to its name, `no_rope_layers` has a 1 for those."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        count, listed = draft.config().num_layers, f.get(name, None)
        if listed is None:
            interval = f.positive("no_rope_layer_interval", 4)
            listed = [int((i + 1) % interval != 0) for i in range(count)]
        if not isinstance(listed, list) or len(listed) < count or not all(one in (0, 1) for one in listed):
            raise ValueError(f"{f.file}: {name} must be {count} times 0 or 1, not {json_repr(listed)}")
        rotary = draft["position"]
        draft.layers["position"] = [rotary if one == 1 else NoPositionConfig() for one in listed[:count]]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        positions = [config.layer(i).position for i in range(config.num_layers)]
        return {name: [int(isinstance(position, RotaryConfig)) for position in positions]}


def has_no_position(draft: Draft, index: int) -> bool:
    return isinstance(draft.layers["position"][index], NoPositionConfig)


class SmolLM3(LlamaLike):
    """Llama without positions in some layers, which may have a window."""

    model_type = "smollm3"
    title = "SmolLM3"
    architectures = {"lm": "SmolLM3ForCausalLM", "none": "SmolLM3Model"}
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(4),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=32768),
        "tie_word_embeddings": Field("embedding.tied", default=False, absent=True),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(base=2e6),
        "no_rope_layers": RotaryLayers(),
        "layer_types": LayerTypes(lambda f, draft, i: has_no_position(draft, i), switch=True),
    }
    # Where layers are listed or none asks for a window; a field of other families; how products were once cut.
    harmless = frozenset({"no_rope_layer_interval", "sliding_window", "max_window_layers", "pretraining_tp"})


FAMILY = SmolLM3()
