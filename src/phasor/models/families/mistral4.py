"""Mistral 4."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Draft, Field
from phasor.models.families._latent import HeadWidths, LatentRope, LatentSize
from phasor.models.families._llama import LlamaLike
from phasor.models.families._routed import FirstDense
from phasor.models.families.deepseek_v3 import DeepSeekV3
from phasor.models.families.ministral3 import BETA, RotaryWithTemperature
from phasor.models.family import ORIGINAL
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, StackedTransposed, linear
from phasor.nn.positions import RotaryConfig

USUAL = {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0, ORIGINAL: 8192}
USUAL |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}
SHARE = "partial_rotary_factor"


class LatentWithTemperature(RotaryWithTemperature, LatentRope):
    """Both; the share of a head that is rotated follows from its widths, and a file may repeat it."""

    def scheme(self, f: Fields, draft: Draft, base: float, partial: float | None) -> RotaryConfig:
        whole, rotated = draft["head_dim"], draft["attention.rope_dim"]
        rope = f.inside(f.data["rope_parameters"], "rope_parameters.")
        share = rope.get(SHARE, f.get(SHARE, rotated / whole))
        if int(whole * share) != rotated:
            raise ValueError(
                f"{f.file}: {SHARE} {json_repr(share)} of {whole} features of a head is not qk_rope_head_dim, {rotated}"
            )
        others = {name: value for name, value in rope.data.items() if name != SHARE}
        inner = f.inside(f.data | {"rope_parameters": others, SHARE: None})
        rotary = super().scheme(inner, draft, base, partial)
        f.taken |= inner.taken
        return rotary


class Mistral4(DeepSeekV3):
    """Latent attention with a temperature by position, and experts by softmax scores without a correction."""

    model_type = "mistral4"
    title = "Mistral 4"
    architectures = {"lm": "Mistral4ForCausalLM", "none": "Mistral4Model"}
    parts = DeepSeekV3.parts | {
        "feedforward.experts.scores": "softmax",
        "feedforward.experts.correction": False,
    }
    fields = {name: entry for name, entry in DeepSeekV3.fields.items() if name not in ("scoring_func", "topk_method")}
    fields |= {
        "max_position_embeddings": Field("max_length", default=1048576),
        "n_routed_experts": Field("feedforward.experts.num_experts", default=128, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "n_group": Field("feedforward.experts.num_groups", default=1),
        "topk_group": Field("feedforward.experts.top_groups", default=1),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=False, absent=True),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.0),
        "first_k_dense_replace": FirstDense(0),
        "qk_nope_head_dim": HeadWidths(64, whole=True),
        "q_lora_rank": Field("attention.q_rank", default=None, absent=1024),
        "kv_lora_rank": LatentSize("attention.kv_rank", default=256),
        "rope_parameters": LatentWithTemperature(usual=USUAL),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from LlamaLike.feedforward(self, ours, theirs)
        yield from LlamaLike.feedforward(self, f"{ours}.shared", f"{theirs}.shared_experts")
        yield from linear(f"{ours}.router", f"{theirs}.gate")
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj", StackedTransposed())
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj", StackedTransposed())


FAMILY = Mistral4()
