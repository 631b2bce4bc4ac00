"""Mistral 7B and its successors of the same shape."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Field
from phasor.models.families._llama import KVHeads, LlamaLike, score_classifiers
from phasor.models.rope import RopeParameters


class Mistral(LlamaLike):
    """Llama without biases and with a window, the same in every layer."""

    model_type = "mistral"
    title = "Mistral"
    architectures = {"lm": "MistralForCausalLM", "none": "MistralModel"}
    classifiers = score_classifiers("Mistral")
    first_choice = True
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(8),
        "max_position_embeddings": Field("max_length", default=131072),
        "sliding_window": Field("attention.window", default=None, absent=4096),
        "hidden_act": Activation("silu", GATES),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(),
    }


FAMILY = Mistral()
