"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import GATES, Activation, Field, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike, score_classifiers
from phasor.models.layout import Rule, experts, linear
from phasor.models.rope import RopeParameters


class Mixtral(LlamaLike):
    """A router sends each token to a few experts, whose weights add up to one."""

    model_type = "mixtral"
    title = "Mixtral"
    architectures = {"lm": "MixtralForCausalLM", "none": "MixtralModel"}
    classifiers = score_classifiers("Mixtral")
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(8),
        "max_position_embeddings": Field("max_length", default=131072),
        "sliding_window": Field("attention.window", default=None),
        "hidden_act": Activation("silu", GATES),
        "num_local_experts": Field("feedforward.experts.num_experts", default=8, fallback="num_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=2),
        "router_jitter_noise": Pinned(0.0),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(base=1e6),
    }
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})  # which outputs are returned, and a loss

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        mixture = f"{theirs.removesuffix('mlp')}block_sparse_moe"
        yield from linear(f"{ours}.router", f"{mixture}.gate")
        each = f"{mixture}.experts.{{e}}"
        yield from experts(ours, f"{each}.w1.weight", f"{each}.w3.weight", f"{each}.w2.weight")


FAMILY = Mixtral()
