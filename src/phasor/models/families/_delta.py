"""Qwen's hybrids: gated delta attention in most layers, gated softmax attention in the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.recurrent import StateSizes
from phasor.models.entries import Activation, Bias, Draft, Field, FieldEntry, Pinned, lacks
from phasor.models.families._llama import LlamaLike
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL
from phasor.models.layout import Layout, OfKind, Piece, Rule, linear
from phasor.nn.attention.gated_delta.config import GatedDeltaAttentionConfig
from phasor.nn.attention.softmax.config import SoftmaxAttentionConfig

LINEAR = "linear_attention"
# Their sizes of layers with a state, ours, and what they are where a file has none.
SIZES = {
    "linear_num_value_heads": ("num_heads", 32),
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}


class LinearLayers(FieldEntry):
    """`layer_types`, and the sizes of the linear ones; stands below all other fields of attention and norms.

    Where a file has no list, every `full_attention_interval`-th layer has softmax attention.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config, interval = draft.config(), f.positive("full_attention_interval", 4)
        usual = [LINEAR if (i + 1) % interval else FULL for i in range(config.num_layers)]
        types = f.get(name, usual)
        if len(types) != len(usual) or not all(kind in (LINEAR, FULL) for kind in types):
            raise ValueError(f"{f.file}: {name} must be {len(usual)} times {LINEAR} or {FULL}, not {json_repr(types)}")
        sizes = {ours: f.get(theirs, default) for theirs, (ours, default) in SIZES.items()}
        with_state = GatedDeltaAttentionConfig(**sizes, norm_eps=draft["norm.eps"])
        draft.layers["attention"] = [with_state if kind == LINEAR else config.attention for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        attentions = [config.layer(i).attention for i in range(config.num_layers)]
        for attention in attentions:
            if not isinstance(attention, GatedDeltaAttentionConfig | SoftmaxAttentionConfig):
                raise lacks(attention)
        fields: dict[str, Any] = {name: [LINEAR if attention.keeps_state else FULL for attention in attentions]}
        with_state = next((attention.resolve(config) for attention in attentions if attention.keeps_state), None)
        return fields | {theirs: getattr(with_state, ours, default) for theirs, (ours, default) in SIZES.items()}


@dataclass(frozen=True)
class ByKeyHead(Layout):
    """Some of what gated delta attention projects, one after the other, where ours is ordered by key head.

    `makes` says what a key head of ours consists of: its query, its key, and the values, gates `z`, write strengths `b`
    and decays `a` of its heads. `between` are the dimensions of size 1 that theirs has behind the first.
    """

    parts: str
    makes: str
    between: tuple[int, ...] = ()
    sizes: StateSizes | None = None

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        attention = model.layer(index).attention
        assert isinstance(attention, GatedDeltaAttentionConfig)
        return replace(self, sizes=attention.sizes(model))

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        assert self.sizes is not None
        heads, key_heads, key, value = self.sizes
        shared = heads // key_heads
        widths = {"q": key, "k": key, "v": shared * value, "z": shared * value, "b": shared, "a": shared}
        by_head = ours.unflatten(0, (key_heads, -1)).split([widths[part] for part in self.makes], dim=1)
        views = dict(zip(self.makes, by_head, strict=True))
        return [Piece(views[part], (key_heads * widths[part], *self.between, *ours.shape[1:])) for part in self.parts]


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
