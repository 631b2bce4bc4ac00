"""Seed-OSS."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.rope import RopeParameters


class SeedOss(LlamaLike):
    """Llama with biases on queries, keys and values, and perhaps on the output."""

    model_type = "seed_oss"
    title = "Seed-OSS"
    architectures = {"lm": "SeedOssForCausalLM", "none": "SeedOssModel"}
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=524288),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(True, ("q", "k", "v")),
        "attention_out_bias": Bias(False, ("out",)),
        "mlp_bias": Field("feedforward.bias", default=False),
        "attention_dropout": Field("dropout.attention", default=0.1),
        "residual_dropout": Field("dropout.residual", default=0.1),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(),
    }
    harmless = frozenset({"pretraining_tp"})  # the tensor-parallel slices of pretraining: the same result


FAMILY = SeedOss()
