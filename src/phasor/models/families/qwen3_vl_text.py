"""Qwen3-VL, its text part."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.rope import MultiSectionParameters
from phasor.nn.positions import MultiSectionConfig

INTERLEAVED = MultiSectionParameters(MultiSectionConfig(sections=(24, 20, 20), interleaved=True), base=5e5)


class Qwen3VLText(LlamaLike):
    """Qwen 3 without windows, with positions of time, height and width that rotate the pairs in turn."""

    model_type = "qwen3_vl_text"
    title = "Qwen3-VL (text)"
    architectures = {"lm": "Qwen3VLForConditionalGeneration", "none": "Qwen3VLTextModel"}
    body = "Qwen3VLTextModel"
    parts = LlamaLike.parts | {"norm": "rmsnorm", "attention.qk_norm": "head"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=128000),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": INTERLEAVED,
    }


FAMILY = Qwen3VLText()
