"""T5Gemma: an encoder and a decoder of Gemma 2's parts, adapted from its decoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import EncoderConfig, LayerConfig, ModelConfig
from phasor.config.model import Side
from phasor.config.schema import names
from phasor.models.entries import (
    GATES,
    Activation,
    Bias,
    Draft,
    Field,
    FieldEntry,
    Nested,
    Pinned,
    write_table,
)
from phasor.models.families._gemma import GemmaLike, QueryScalar
from phasor.models.families._llama import KVHeads
from phasor.models.family import Family, differences
from phasor.models.fields import Fields
from phasor.models.layer_types import LayerTypes
from phasor.models.layout import Rule, cross_projections, glu, linear, projections
from phasor.models.rope import RopeParameters

SIDE: dict[str, FieldEntry] = {
    "vocab_size": Field("vocab_size", default=256000),
    "hidden_size": Field("dim", default=2304),
    "intermediate_size": Field("hidden_dim", default=9216),
    "num_hidden_layers": Field("num_layers", default=26),
    "num_attention_heads": Field("num_heads", default=8),
    "num_key_value_heads": KVHeads(4),
    "head_dim": Field("head_dim", default=256),
    "max_position_embeddings": Field("max_length", default=8192),
    "hidden_activation": Activation("gelu_pytorch_tanh", GATES),
    "attention_bias": Bias(False),
    "rms_norm_eps": Field("norm.eps", default=1e-6),
    "query_pre_attn_scalar": QueryScalar(),
    "attn_logit_softcapping": Field("attention.softcap", default=None, absent=50.0),
    "layer_types": LayerTypes(lambda f, draft, i: i % 2 == 0, absent=4096),
    "rope_parameters": RopeParameters(),
}
# What transformers takes from outside of the two, and what only the decoder has.
HARMLESS = """
    attention_dropout bos_token_id classifier_dropout_rate cross_attention_hidden_size dropout_rate eos_token_id
    final_logit_softcapping initializer_range is_decoder model_type pad_token_id tie_word_embeddings
"""


def shift_windows(config: ModelConfig, by: int) -> ModelConfig:
    """A model whose windows are wider: the encoder's reach one token further to each side than the decoder's."""

    def shift(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        if attention is None or attention.window is None:
            return layer
        return layer.replace(attention=attention.replace(window=attention.window + by))

    moved = config.change_layers(shift)
    return moved.replace(attention=shift(LayerConfig(attention=config.attention)).attention)


class EncoderFields(Nested):
    """`encoder`, below `decoder`: its width, heads, depth, vocabulary and windows are its own."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        own = Draft({path: value for path, value in draft.values.items() if path != "attention.bias"})  # adds up
        super().read(f, name, own)
        decoder, encoder = draft.build(), shift_windows(own.build(), 1)
        given = {x: getattr(encoder, x) for x in names(EncoderConfig) if getattr(encoder, x) != getattr(decoder, x)}
        draft.values |= {
            "num_encoder_layers": encoder.num_layers,
            "embedding.source_vocab_size": encoder.vocab_size,
            "encoder": EncoderConfig(**given) if given else None,
        }
        same = {"vocab_size": decoder.vocab_size, "embedding": draft.config().embedding}
        different = differences(draft.build().for_side("encoder"), encoder.replace(**same))
        if different:
            raise ValueError(f"{f.file}: encoder and decoder differ in more than their sizes: {', '.join(different)}")

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        vocab_size = config.embedding.source_vocab_size
        if vocab_size is None:
            raise ValueError("its encoder has its own table of tokens")
        encoder = shift_windows(config.for_side("encoder"), -1)
        return {name: write_table(self.fields, encoder.replace(vocab_size=vocab_size))}


class T5Gemma(Family):
    """Norms on both sides of attention, cross-attention and network; tables of both sides, the head tied to one."""

    model_type = "t5gemma"
    title = "T5Gemma"
    architectures = {"lm": "T5GemmaForConditionalGeneration", "none": "T5GemmaModel"}
    parts = GemmaLike.parts | {"placement": "sandwich"}
    shapes = ("encoder-decoder",)
    fields = {
        "is_encoder_decoder": Pinned(True, written=True),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "dropout_rate": Field("dropout.residual", "dropout.embedding", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "decoder": Nested(
            SIDE | {"final_logit_softcapping": Field("head.softcap", default=None, absent=30.0)}, HARMLESS.split()
        ),
        "encoder": EncoderFields(SIDE, HARMLESS.split()),
    }
    embedding = "model.decoder.embed_tokens.weight"
    head = "lm_head.out_proj.weight"
    harmless = frozenset({"cache_implementation", "classifier_dropout_rate", "initializer_range", "vocab_size"})

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("source_tokens.weight", "model.encoder.embed_tokens.weight")
        yield Rule("head.weight", self.head)
        yield from self.stack("encoder", ("self_attn", "feedforward"))
        yield from self.stack("decoder", ("self_attn", "cross_attn", "feedforward"))

    def stack(self, side: Side, sublayers: tuple[str, ...]) -> Iterator[Rule]:
        block, layer = f"{side}.blocks.{{i}}", f"model.{side}.layers.{{i}}"
        yield from linear(f"{side}.norm", f"model.{side}.norm")
        yield from projections(f"{block}.attention", f"{layer}.self_attn")
        yield from linear(f"{block}.attention.out", f"{layer}.self_attn.o_proj")
        yield from cross_projections(f"{block}.cross", f"{layer}.cross_attn")
        yield from linear(f"{block}.cross.out", f"{layer}.cross_attn.o_proj")
        norms = [f"{place}_{sublayer}_layernorm" for sublayer in sublayers for place in ("pre", "post")]
        for index, norm in enumerate(norms):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        yield from glu(f"{block}.feedforward.up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.down_proj")


FAMILY = T5Gemma()
