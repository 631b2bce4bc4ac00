"""Qwen 1.5, 2 and 2.5."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Field, HeadDim, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike, score_classifiers
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters


class Qwen2(LlamaLike):
    """Llama with biases on queries, keys and values, and windows in the later layers."""

    model_type = "qwen2"
    title = "Qwen 2, 2.5"
    architectures = {"lm": "Qwen2ForCausalLM", "none": "Qwen2Model"}
    classifiers = score_classifiers("Qwen2")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "attention.bias": ("q", "k", "v")}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=32768),
        "hidden_act": Activation("silu", GATES),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "use_mrope": Pinned(False),
        "rope_parameters": RopeParameters(),
        "layer_types": LayerTypes(lambda f, draft, i: i >= f.get("max_window_layers", 28), absent=4096, switch=True),
    }
    harmless = frozenset({"max_window_layers", "sliding_window"})  # where no layer asks for them


FAMILY = Qwen2()
