"""Moonshine: speech to text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from phasor.config import EncoderConfig, FeedForwardConfig, LayerConfig, ModelConfig
from phasor.config.front_end import ConvolutionConfig, FrontEndConfig
from phasor.models.entries import (
    ACTIVATIONS,
    GATES,
    WRITTEN_NAMES,
    Activation,
    Bias,
    Draft,
    Field,
    FieldEntry,
    HeadDim,
    InitStd,
    Pinned,
    Repeated,
    SameAs,
)
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import SAME, Rule, UpFirst, cross_projections, linear, projections
from phasor.models.rope import RopeParameters


def front_end(dim: int) -> FrontEndConfig:
    """Convolutions over samples: a vector for every 384 of them."""
    first = ConvolutionConfig(features=dim, width=127, stride=64, bias=False, activation="tanh", norm=True)
    second = ConvolutionConfig(features=2 * dim, width=7, stride=3)
    return FrontEndConfig(features=1, convolutions=(first, second, ConvolutionConfig(features=dim, width=3, stride=2)))


class EncoderActivation(FieldEntry):
    """`encoder_hidden_act`: the encoder's network is plain, and that of the decoder gated."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        draft["embedding.front_end"] = front_end(draft["dim"])
        network = FeedForwardConfig(activation=f.choose(name, ACTIVATIONS, "gelu"), bias=True)
        draft["encoder"] = EncoderConfig(layers=(LayerConfig(feedforward=network),))

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if config.embedding.front_end is None:
            raise ValueError("its source are samples of audio")
        kind = config.for_side("encoder").layer(0).feedforward.activation.kind
        return {name: WRITTEN_NAMES.get(kind, kind)}


class Moonshine(Family):
    """Pre-norm without biases of norms; convolutions over samples, rotary positions in adjacent pairs on both sides."""

    model_type = "moonshine"
    title = "Moonshine"
    architectures = {"lm": "MoonshineForConditionalGeneration", "none": "MoonshineModel"}
    shapes = ("encoder-decoder",)
    parts = Family.parts | {
        "feedforward.bias": True,
        "norm": "layernorm",
        "norm.bias": False,
        "placement": "pre",
    }
    fields = {
        "is_encoder_decoder": Pinned(True, written=True),
        "vocab_size": Field("vocab_size", default=32768),
        "hidden_size": Field("dim", default=288),
        "intermediate_size": Field("hidden_dim", default=1152),
        "decoder_num_hidden_layers": Field("num_layers", default=6, alias="num_hidden_layers"),
        "encoder_num_hidden_layers": Field("num_encoder_layers", default=6),
        "decoder_num_attention_heads": Field("num_heads", default=8),
        "encoder_num_attention_heads": Repeated("num_heads"),
        "num_attention_heads": Pinned(SameAs("num_heads")),
        "decoder_num_key_value_heads": Pinned(SameAs("num_heads")),  # transformers fails on any other number
        "encoder_num_key_value_heads": Pinned(SameAs("num_heads")),
        "num_key_value_heads": Pinned(SameAs("num_heads")),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=512),
        "attention_bias": Bias(False, ("q", "k", "v")),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "decoder_hidden_act": Activation("silu", GATES),
        "encoder_hidden_act": EncoderActivation(),
        "rope_parameters": RopeParameters(partial=0.9, pairing="adjacent"),
    }
    unprefixed = ("proj_out.",)
    embedding = "model.decoder.embed_tokens.weight"
    head = "proj_out.weight"
    harmless = frozenset({"pad_head_dim_to_multiple_of"})  # features of zeros, which change no score
    unsupported = frozenset({"hidden_act"})  # another name of the decoder's activation

    def source_inputs(self, source: Tensor) -> dict[str, Tensor]:
        return {"input_values": source[..., 0]}

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        for index in range(3):
            yield from linear(f"front_end.{index}.convolution", f"model.encoder.conv{index + 1}")
        yield from linear("front_end.0.norm", "model.encoder.groupnorm")
        yield from linear("encoder.norm", "model.encoder.layer_norm")
        yield from linear("decoder.norm", "model.decoder.norm")
        yield from self.stack("encoder", ("input_layernorm", "post_attention_layernorm"))
        yield from self.stack("decoder", ("input_layernorm", "post_attention_layernorm", "final_layernorm"))

    def stack(self, side: str, norms: tuple[str, ...]) -> Iterator[Rule]:
        block, layer = f"{side}.blocks.{{i}}", f"model.{side}.layers.{{i}}"
        yield from projections(f"{block}.attention", f"{layer}.self_attn")
        yield from linear(f"{block}.attention.out", f"{layer}.self_attn.o_proj")
        yield from cross_projections(f"{block}.cross", f"{layer}.encoder_attn")
        yield from linear(f"{block}.cross.out", f"{layer}.encoder_attn.o_proj")
        for index, norm in enumerate(norms):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        gated = UpFirst() if side == "decoder" else SAME
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.fc1", gated)
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.fc2")


FAMILY = Moonshine()
