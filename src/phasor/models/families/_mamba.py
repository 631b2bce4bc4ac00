"""Hybrids of Mamba-2 and softmax attention: the fields of their layers with a state, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import FieldEntry, Pinned
from phasor.models.families._llama import LlamaLike
from phasor.models.families._recurrent import ByKeyHead, StateLayers
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Flat, OfKind, Rule, linear
from phasor.nn.attention.mamba2.config import Mamba2AttentionConfig

# Their sizes of layers with a state, ours, and what they are where a file has none.
SIZES = {
    "mamba_n_heads": ("num_heads", 128),
    "mamba_n_groups": ("num_key_heads", 1),
    "mamba_d_state": ("key_dim", 256),
    "mamba_d_conv": ("conv_width", 4),
    "mamba_conv_bias": ("conv_bias", True),
    "mamba_proj_bias": ("bias", False),
}


class MambaLayers(StateLayers):
    """Mamba-2, whose heads share a multiple of the model's width, `mamba_expand`."""

    def __init__(self) -> None:
        super().__init__(Mamba2AttentionConfig, SIZES)

    def more_sizes(self, f: Fields, config: ModelConfig, sizes: dict[str, Any]) -> dict[str, Any]:
        heads, width = sizes["num_heads"], f.positive("mamba_expand", 2) * config.dim
        head_dim = f.raw("mamba_d_head", "auto")
        if type(heads) is not int or heads < 1 or width % heads or head_dim not in ("auto", width // heads):
            raise ValueError(
                f"{f.file}: {heads} heads (mamba_n_heads) of mamba_d_head = {json_repr(head_dim)} features are not "
                f"mamba_expand * hidden_size = {width}"
            )
        return super().more_sizes(f, config, sizes) | {"value_dim": width // heads}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        attentions = (config.layer(i).attention for i in range(config.num_layers))
        with_state = next((found for found in attentions if isinstance(found, Mamba2AttentionConfig)), None)
        fields = super().write(name, config)
        if with_state is None:  # their checks are of sizes that no layer has
            return fields | {"mamba_n_heads": config.dim, "mamba_d_head": 1, "mamba_expand": 1}
        width, value_dim = with_state.output_width(config), with_state.sizes(config).value
        if width % config.dim:
            raise ValueError(f"its heads with a state have a multiple of {config.dim} features together, not {width}")
        return fields | {"mamba_d_head": value_dim, "mamba_expand": width // config.dim}


class WithMamba(LlamaLike):
    """Names and fields of Mamba-2 among those of Llama."""

    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields: ClassVar[dict[str, FieldEntry]] = LlamaLike.fields | {
        # The times of tokens are not clamped; infinity is spelt in two ways.
        "time_step_limit": Pinned(None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")]),
    }
    harmless = frozenset({"mamba_chunk_size"})  # how it is computed
    unsupported = frozenset({"layers_block_type"})  # another name of layer types

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        yield from self.mamba("decoder.blocks.{i}.attention", "model.layers.{i}.mamba")

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from (rule for rule in super().attention(ours, theirs) if not rule.ours.startswith(f"{ours}.out"))
        yield from linear(f"{ours}.out", f"{theirs}.o_proj", OfKind("softmax"))

    def mamba(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield Rule(f"{ours}.convolution", f"{theirs}.conv1d.weight", ByKeyHead("vkq", "qkv", between=(1,)))
        yield Rule(f"{ours}.convolution_bias", f"{theirs}.conv1d.bias", ByKeyHead("vkq", "qkv"))
        for name in ("A_log", "dt_bias", "D"):
            yield Rule(f"{ours}.{name}", f"{theirs}.{name}")
        yield from linear(f"{ours}.qkvz", f"{theirs}.in_proj", ByKeyHead("zvkqa", "qkvza"))
        yield Rule(f"{ours}.norm.weight", f"{theirs}.norm.weight", Flat())
        yield from linear(f"{ours}.out", f"{theirs}.out_proj", OfKind("mamba2"))
