"""Qwen 3."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike, score_classifiers
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters


class Qwen3(LlamaLike):
    """Llama with norms on each head of queries and keys, and windows in the later layers."""

    model_type = "qwen3"
    title = "Qwen 3"
    architectures = {"lm": "Qwen3ForCausalLM", "none": "Qwen3Model"}
    classifiers = score_classifiers("Qwen3")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "attention.qk_norm": "head"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=32768),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(),
        "layer_types": LayerTypes(lambda f, draft, i: i >= f.get("max_window_layers", 28), absent=4096, switch=True),
    }
    harmless = frozenset({"max_window_layers", "sliding_window"})  # where no layer asks for them


FAMILY = Qwen3()
