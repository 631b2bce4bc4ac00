"""gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Bias, Field, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.layer_types import LayerTypes
from phasor.models.layout import Interleaved, Rule, linear
from phasor.models.rope import RopeParameters

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(LlamaLike):
    """Sink logits, every second layer local, clamped SwiGLU experts with biases, gates and ups alternating."""

    model_type = "gpt_oss"
    title = "gpt-oss"
    architectures = {"lm": "GptOssForCausalLM", "none": "GptOssModel"}
    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "attention.sink_logits": True,
        "feedforward.activation": "swiglu-clamped",
        "feedforward.bias": True,
        "feedforward.experts.router_bias": True,
    }
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=None, absent=64),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_act": Pinned("silu"),
        "num_local_experts": Field("feedforward.experts.num_experts", default=128, fallback="num_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "attention_bias": Bias(True),
        "swiglu_limit": Field("feedforward.activation.limit", default=7.0),
        "swiglu_alpha": Field("feedforward.activation.gain", default=1.702),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(base=150000.0, usual=YARN),
        "layer_types": LayerTypes(lambda f, draft, i: i % 2 == 0, absent=128),
    }
    # losses, which outputs are returned, and what other fields say again
    harmless = frozenset(
        {"experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef"}
    )

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().attention(ours, theirs)
        yield Rule(f"{ours}.sinks", f"{theirs}.sinks")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.router", f"{theirs}.router")
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj", Interleaved())
        yield Rule(f"{ours}.up_bias", f"{theirs}.experts.gate_up_proj_bias", Interleaved())
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj")
        yield Rule(f"{ours}.down_bias", f"{theirs}.experts.down_proj_bias")


FAMILY = GptOss()
