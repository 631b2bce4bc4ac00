"""Bamba."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim
from phasor.models.families._llama import KVHeads
from phasor.models.families._mamba import MambaLayers, WithMamba
from phasor.models.families._recurrent import LINEAR
from phasor.models.fields import Fields
from phasor.models.layer_types import FULL
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class AttentionIndices(MambaLayers):
    """`attn_layer_indices`: the layers with softmax attention."""

    def listed_types(self, f: Fields, name: str, layers: int) -> list[str]:
        found = f.get(name, [])
        return [FULL if i in found else LINEAR for i in range(layers)]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        fields = super().write(name, config)
        return fields | {name: [i for i, kind in enumerate(fields[name]) if kind == FULL]}


class Bamba(WithMamba):
    """Mamba-2 in most layers, half of each head rotated in the others."""

    model_type = "bamba"
    title = "Bamba"
    architectures = {"lm": "BambaForCausalLM", "none": "BambaModel"}
    last_norm = "final_layernorm"
    norms = ("input_layernorm", "pre_ff_layernorm")
    fields = WithMamba.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=262144),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(partial=0.5),
        "attn_layer_indices": AttentionIndices(),
    }
    # A loss, how many logits are computed in generation, and the rotated width, which is half of a head's.
    harmless = WithMamba.harmless | {"z_loss_coefficient", "num_logits_to_keep", "attn_rotary_emb"}

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        return super().feedforward(ours, f"{theirs.removesuffix('mlp')}feed_forward")


FAMILY = Bamba()
