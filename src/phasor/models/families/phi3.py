"""Phi-3, Phi-3.5 and Phi-4: fused projections, and LongRoPE in those that read 128,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Draft, Field, HeadDim, Pinned
from phasor.models.families._llama import LlamaLike, fused_gate, score_classifiers
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, linear
from phasor.models.rope import RopeParameters
from phasor.nn.positions import LongRoPE

ORIGINAL = "original_max_position_embeddings"


class LongRotary(RopeParameters):
    """LongRoPE or none. The length it starts from stands beside its parameters, and goes before one that is in them."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.defaults[ORIGINAL] = 4096
        super().read(f, name, draft)
        extension = draft["position"].extension
        if not isinstance(extension, LongRoPE | None):
            raise ValueError(f"{f.file}: the rope_type of phi3 is default or longrope, not {extension.kind!r}")

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        extension = getattr(config.position, "extension", None)
        original = extension.original_length if isinstance(extension, LongRoPE) else config.original_length()
        return super().write(name, config) | {ORIGINAL: original}


class Phi3(LlamaLike):
    """Llama with queries, keys and values in one tensor, gate and up in another, and perhaps a window."""

    model_type = "phi3"
    title = "Phi-3, 3.5, 4"
    architectures = {"lm": "Phi3ForCausalLM", "none": "Phi3Model"}
    classifiers = score_classifiers("Phi3")
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=4096),
        "sliding_window": Field("attention.window", default=None),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Pinned(False),
        "mlp_bias": Pinned(False),
        "lm_head_bias": Pinned(False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "embd_pdrop": Field("dropout.embedding", default=0.0),
        "resid_pdrop": Field("dropout.residual", default=0.0),
        "rope_parameters": LongRotary(partial=1.0),
        "full_attn_mod": Pinned(1),  # of Phi-4-mini's own code, as the next
        "interpolate_factor": Pinned(1),
    }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.qkv", f"{theirs}.qkv_proj", Parts("qkv"))
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from fused_gate(ours, theirs)


FAMILY = Phi3()
