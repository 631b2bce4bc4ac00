"""Helium 1."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.rope import RopeParameters


class Helium(LlamaLike):
    """Llama with adjacent features rotated."""

    model_type = "helium"
    title = "Helium 1"
    architectures = {"lm": "HeliumForCausalLM", "none": "HeliumModel"}
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(20),
        "head_dim": Field("head_dim", default=128),
        "max_position_embeddings": Field("max_length", default=4096),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False, ("q", "k", "v")),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-8),
        "rope_parameters": RopeParameters(base=100000.0, pairing="adjacent"),
    }


FAMILY = Helium()
