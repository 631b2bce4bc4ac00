"""GPT-2 and what kept its shape: DialoGPT, DistilGPT2, Cerebras-GPT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import ALL_PROJECTIONS, Draft, FieldEntry, Switch, TableLength, require_kind
from phasor.models.families._gpt import GPTLike
from phasor.models.fields import Fields
from phasor.models.layout import Layout, Parts, Rule, Transposed, linear
from phasor.nn.attention import SoftmaxAttentionConfig


class ScaleByDepth(FieldEntry):
    """`scale_attn_by_inverse_layer_idx`: the scores of a layer are divided by its number, from 1."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if f.get(name, False):
            config = draft.config()
            scale = require_kind(config.attention, SoftmaxAttentionConfig).scale or config.head_dim**-0.5
            draft.layers["attention.scale"] = [scale / (i + 1) for i in range(config.num_layers)]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        layers = (require_kind(config.layer(i).attention, SoftmaxAttentionConfig) for i in (0, config.num_layers - 1))
        first, last = (attention.scale or config.head_dim**-0.5 for attention in layers)
        return {name: first != last}


class ScaledScores(Switch):
    """`scale_attn_weights`: whether scores are divided by the root of a head's width."""

    def __init__(self) -> None:
        super().__init__("attention.scale", on=None, off=1.0, default=True)

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return value in (None, config.head_dim**-0.5)


class GPT2(GPTLike):
    """Pre-norm, a learned table of positions, biases everywhere, matrices stored `[in, out]`."""

    model_type = "gpt2"
    title = "GPT-2"
    architectures = {"lm": "GPT2LMHeadModel", "none": "GPT2Model"}
    first_choice = True
    parts = GPTLike.parts | {"position": "learned", "attention.bias": ALL_PROJECTIONS, "init.by_depth": True}
    fields = GPTLike.fields | {
        "n_positions": TableLength(alias="max_position_embeddings"),
        "scale_attn_weights": ScaledScores(),
        "scale_attn_by_inverse_layer_idx": ScaleByDepth(),
    }
    # The one field more says in what precision and order scores are computed.
    harmless = GPTLike.harmless | {"reorder_and_upcast_attn"}
    unsupported = frozenset({"add_cross_attention"})

    positions = "transformer.wpe.weight"
    qkv: ClassVar[Layout] = Transposed(Parts("qkv"))
    matrices: ClassVar[Layout] = Transposed()

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("decoder.positions.0.weight", self.positions)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.ln_f")
        block, layer = "decoder.blocks.{i}", "transformer.h.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.ln_1")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.c_attn", self.qkv)
        yield from linear(f"{block}.attention.out", f"{layer}.attn.c_proj", self.matrices)
        yield from linear(f"{block}.residual.norms.1", f"{layer}.ln_2")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.c_fc", self.matrices)
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.c_proj", self.matrices)


FAMILY = GPT2()
