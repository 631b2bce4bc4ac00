"""dots.llm1."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim
from phasor.models.families._llama import KVHeads
from phasor.models.families._routed import FirstDense, Routed
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters


class Dots1(Routed):
    """Qwen 3's attention, with windows in the last layers, and DeepSeek's mixture."""

    model_type = "dots1"
    title = "dots.llm1"
    architectures = {"lm": "Dots1ForCausalLM", "none": "Dots1Model"}
    parts = Routed.parts | {"attention.qk_norm": "head"}
    fields = Routed.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": HeadDim(),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        **Routed.mixture,
        "norm_topk_prob": Field("feedforward.experts.normalize", default=False),
        "first_k_dense_replace": FirstDense(0),
        "rope_parameters": RopeParameters(),
        "layer_types": LayerTypes(
            lambda f, draft, i: f.data.get("sliding_window", 4096) is not None and i >= f.get("max_window_layers", 62),
            absent=4096,
        ),
    }
    harmless = frozenset({"max_window_layers", "output_router_logits"})


FAMILY = Dots1()
