"""LFM2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, HeadDim
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.families._recurrent import StateLayers
from phasor.models.fields import Fields
from phasor.models.layer_types import FULL
from phasor.models.layout import Layout, OfKind, Piece, Rule, glu, linear, projections
from phasor.models.rope import RopeParameters
from phasor.nn.attention.short_convolution.config import ShortConvolutionAttentionConfig

CONVOLUTION = "conv"
SIZES = {"conv_L_cache": ("conv_width", 3), "conv_bias": ("bias", False)}  # theirs, ours, and where a file has none


class ConvolutionLayers(StateLayers):
    """`layer_types`; without them, `full_attn_idxs` are the layers with softmax attention, or all are."""

    type_name = CONVOLUTION

    def __init__(self) -> None:
        super().__init__(ShortConvolutionAttentionConfig, SIZES)

    def usual_types(self, f: Fields, layers: int) -> list[str]:
        indices = f.get("full_attn_idxs", list(range(layers)))
        return [FULL if i in indices else CONVOLUTION for i in range(layers)]

    def more_sizes(self, f: Fields, config: ModelConfig, sizes: dict[str, Any]) -> dict[str, Any]:
        return {}


class AdjustedWidth(FieldEntry):
    """`intermediate_size`, of which two thirds times a factor are taken by default, rounded up to a multiple.

    Older files name it `block_ff_dim`.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        given = f.positive(name, 12288)
        width = f.positive("block_ff_dim", given)
        multiple, factor = f.positive("block_multiple_of", 256), f.get("block_ffn_dim_multiplier", 1.0)
        if f.get("block_auto_adjust_ff_dim", True):
            width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
        draft["hidden_dim"] = width

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: config.hidden_dim, "block_auto_adjust_ff_dim": False}


@dataclass(frozen=True)
class Taps(Layout):
    """The weight of a convolution of each channel by itself, which has a dimension of size 1 between."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        return [Piece(ours, (len(ours), 1, ours.shape[1]))]


class LFM2(LlamaLike):
    """Gated short convolutions in most layers, softmax attention with norms of queries and keys in the others."""

    model_type = "lfm2"
    title = "LFM2"
    architectures = {"lm": "Lfm2ForCausalLM", "none": "Lfm2Model"}
    last_norm = "embedding_norm"
    norms = ("operator_norm", "ffn_norm")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "feedforward.activation": "swiglu", "attention.qk_norm": "head"}
    fields = {name: entry for name, entry in LlamaLike.fields.items() if name != "attention_dropout"} | {
        "intermediate_size": AdjustedWidth(),
        "num_key_value_heads": KVHeads(8),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=128000),
        "tie_word_embeddings": Field("embedding.tied", default=True, fallback="tie_embedding"),
        "norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(1e6),
        "layer_types": ConvolutionLayers(),
    }
    # How weights were drawn, and sizes that other fields have too.
    harmless = frozenset(
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init
        conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc
        """.split()  # noqa: SIM905
    )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        ours, theirs = "decoder.blocks.{i}.attention", "model.layers.{i}.conv"
        yield Rule(f"{ours}.convolution", f"{theirs}.conv.weight", Taps())
        yield Rule(f"{ours}.convolution_bias", f"{theirs}.conv.bias")
        yield from linear(f"{ours}.gates_and_values", f"{theirs}.in_proj")
        yield from linear(f"{ours}.out", f"{theirs}.out_proj", OfKind("short-convolution"))

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.out_proj", OfKind("softmax"))
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_layernorm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.k_layernorm")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        network = f"{theirs.removesuffix('mlp')}feed_forward"
        yield from glu(f"{ours}.up", f"{network}.w1", f"{network}.w3")
        yield from linear(f"{ours}.down", f"{network}.w2")


FAMILY = LFM2()
