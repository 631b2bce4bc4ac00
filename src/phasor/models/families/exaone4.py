"""EXAONE 4.0."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Draft, Field, HeadDim
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.fields import Fields
from phasor.models.layer_types import RotaryInWindows
from phasor.models.rope import RopeParameters


def is_local(f: Fields, draft: Draft, index: int) -> bool:
    return "layer_types" not in f and (index + 1) % f.positive("sliding_window_pattern", 4) != 0


class Exaone4(LlamaLike):
    """Norms on the outputs of sub-layers and on each head of queries and keys; no positions in global layers."""

    model_type = "exaone4"
    title = "EXAONE 4.0"
    architectures = {"lm": "Exaone4ForCausalLM", "none": "Exaone4Model"}
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "placement": "output", "attention.qk_norm": "head"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": HeadDim(),
        "hidden_act": Activation("silu", GATES),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
        "layer_types": RotaryInWindows(is_local, absent=4096, without_window="rotary"),
    }
    harmless = frozenset({"sliding_window_pattern"})  # where layers are listed


FAMILY = Exaone4()
