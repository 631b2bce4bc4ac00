"""MiniMax M2."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import GATES, Activation, Draft, Field, FieldEntry, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import Rule, experts, linear
from phasor.models.rope import RopeParameters


class RotaryDim(FieldEntry):
    """How many features of a head are rotated, in files that do not say which share; stands above `rope_parameters`."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        width = f.get(name, None)
        if width is not None:
            f.defaults["partial_rotary_factor"] = width / draft["head_dim"]


class MiniMaxM2(LlamaLike):
    """Mixtral with sigmoid scores and a correction of the choice, and norms over all queries and all keys."""

    model_type = "minimax_m2"
    title = "MiniMax M2"
    architectures = {"lm": "MiniMaxM2ForCausalLM", "none": "MiniMaxM2Model"}
    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "attention.qk_norm": "whole",
        "feedforward.experts.scores": "sigmoid",
        "feedforward.experts.correction": True,
    }
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=128),
        "max_position_embeddings": Field("max_length", default=196608),
        "hidden_act": Activation("silu", GATES),
        "num_local_experts": Field("feedforward.experts.num_experts", default=256, fallback="num_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "router_jitter_noise": Pinned(0.0),
        "scoring_func": Pinned("sigmoid"),
        "use_routing_bias": Pinned(True),
        "use_qk_norm": Pinned(True),
        "qk_norm_type": Pinned("per_layer"),
        "shared_intermediate_size": Pinned(0),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rotary_dim": RotaryDim(),
        "rope_parameters": RopeParameters(base=5e6, partial=1.0),
    }
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})  # which outputs are returned, and a loss

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        mixture = f"{theirs.removesuffix('mlp')}block_sparse_moe"
        yield from linear(f"{ours}.router", f"{mixture}.gate")
        yield Rule(f"{ours}.correction", f"{mixture}.e_score_correction_bias")
        each = f"{mixture}.experts.{{e}}"
        yield from experts(ours, f"{each}.w1.weight", f"{each}.w3.weight", f"{each}.w2.weight")


FAMILY = MiniMaxM2()
