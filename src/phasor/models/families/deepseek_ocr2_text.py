"""DeepSeek-OCR and DeepSeek-OCR 2, their text part."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import GATES, Activation, Bias, Field, Pinned, SameAs
from phasor.models.families._latent import ExpertsByLayer
from phasor.models.families._llama import LlamaLike
from phasor.models.families._routed import SharedExperts
from phasor.models.families.deepseek_v2 import ChoiceMethod, DeepSeekV2
from phasor.models.layout import Rule, StackedTransposed, experts, linear
from phasor.models.rope import RopeParameters

# Widths of latent attention, which there is none of, and which heads there are.
OTHERS = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim lm_head rm_head"


class DeepSeekOCR2Text(LlamaLike):
    """DeepSeek V2 with keys and values for every head, rotated whole."""

    model_type = "deepseek_ocr2_text"
    title = "DeepSeek-OCR (text)"
    architectures = {"lm": "DeepseekOcr2ForConditionalGeneration", "none": "DeepseekOcr2TextModel"}
    aliases = {"DeepseekV2ForCausalLM": "lm", "DeepseekOCRForCausalLM": "lm"}
    body = "DeepseekOcr2TextModel"
    parts = {path: part for path, part in DeepSeekV2.parts.items() if not path.startswith("attention")}
    fields = {
        "n_routed_experts": Field("feedforward.experts.num_experts", default=64, fallback="num_experts"),
        **LlamaLike.fields,
        "head_dim": Pinned(None, SameAs("head_dim")),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Pinned(False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "num_experts_per_tok": Field("feedforward.experts.top_k"),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1407),
        "n_shared_experts": SharedExperts(2),
        "topk_method": ChoiceMethod(),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.0),
        "mlp_layer_types": ExpertsByLayer(0),
        "rope_parameters": RopeParameters(),
        "use_mla": Pinned(False),
        "scoring_func": Pinned("softmax"),
        "norm_topk_prob": Pinned(False),
    }
    # How products were once cut, and which outputs are returned.
    harmless = frozenset({"pretraining_tp", "output_router_logits", *OTHERS.split()})

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_experts")
        yield from linear(f"{ours}.router", f"{theirs}.gate")
        gate, up, down = experts(
            ours, *(f"{theirs}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        )
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj", StackedTransposed(), otherwise=(gate, up))
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj", StackedTransposed(), otherwise=(down,))


FAMILY = DeepSeekOCR2Text()
