"""Qwen's hybrids: gated delta attention in most layers, gated softmax attention in the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import Activation, Bias, Field, FieldEntry, Pinned
from phasor.models.families._llama import LlamaLike
from phasor.models.families._recurrent import LINEAR, ByKeyHead, StateLayers
from phasor.models.fields import Fields
from phasor.models.layer_types import FULL
from phasor.models.layout import OfKind, Rule, linear
from phasor.nn.attention.gated_delta.config import GatedDeltaAttentionConfig

# Their sizes of layers with a state, ours, and what they are where a file has none.
SIZES = {
    "linear_num_value_heads": ("num_heads", 32),
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}


class LinearLayers(StateLayers):
    """Gated delta attention; without a list, every `full_attention_interval`-th layer has softmax attention."""

    def __init__(self) -> None:
        super().__init__(GatedDeltaAttentionConfig, SIZES)

    def usual_types(self, f: Fields, layers: int) -> list[str]:
        interval = f.positive("full_attention_interval", 4)
        return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]


class Hybrid(LlamaLike):
    """Norms by 1 + weight, a part of each head rotated, queries and keys normalized, results gated."""

    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "norm.unit_offset": True,
        "attention.qk_norm": "head",
        "attention.output_gate": True,
    }
    fields: ClassVar[dict[str, FieldEntry]] = LlamaLike.fields | {
        "head_dim": Field("head_dim", default=None, absent=256),
        "max_position_embeddings": Field("max_length", default=32768),
        "hidden_act": Activation("silu", {"silu": "swiglu", "swish": "swiglu"}),  # that of the convolution too
        "attention_bias": Bias(False),
        "attn_output_gate": Pinned(True),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
    }
    # Layers that predict further tokens in training, which outputs are returned, a loss, the dtype of a state, and
    # windows, which there are none of.
    harmless = frozenset(
        """
        mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings output_router_logits
        router_aux_loss_coef sliding_window use_sliding_window
        """.split()  # noqa: SIM905
    )
    passthrough = ("mtp.*",)
    unprefixed = ("lm_head.", "mtp.")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        yield from self.gated_delta("decoder.blocks.{i}.attention", "model.layers.{i}.linear_attn")

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from (rule for rule in super().attention(ours, theirs) if not rule.ours.startswith(f"{ours}.out"))
        yield from linear(f"{ours}.out", f"{theirs}.o_proj", OfKind("softmax"))

    def gated_delta(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield Rule(f"{ours}.convolution", f"{theirs}.conv1d.weight", ByKeyHead("qkv", "qkv", between=(1,)))
        yield Rule(f"{ours}.A_log", f"{theirs}.A_log")
        yield Rule(f"{ours}.dt_bias", f"{theirs}.dt_bias")
        yield from self.inputs(ours, theirs)
        yield from linear(f"{ours}.norm", f"{theirs}.norm")
        yield from linear(f"{ours}.out", f"{theirs}.out_proj", OfKind("gated-delta"))

    def inputs(self, ours: str, theirs: str) -> Iterator[Rule]:
        """The projections of the input."""
        for part, name in (("qkv", "in_proj_qkv"), ("z", "in_proj_z")):
            yield Rule(f"{ours}.qkvz.weight", f"{theirs}.{name}.weight", ByKeyHead(part, "qkvz"))
        for part, name in (("b", "in_proj_b"), ("a", "in_proj_a")):
            yield Rule(f"{ours}.gates.weight", f"{theirs}.{name}.weight", ByKeyHead(part, "ba"))
