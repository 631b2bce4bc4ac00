"""GPT-2 and what kept its shape: DialoGPT, DistilGPT2, Cerebras-GPT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, EmbeddingConfig, LayerNormConfig, ModelConfig, NormalInitConfig
from phasor.models.families._gpt import EVERY, GPTLike
from phasor.models.families._layers import vary_layers
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, Transposed, linear
from phasor.nn.positions import LearnedConfig


class GPT2(GPTLike):
    """Pre-norm, a learned table of positions, biases everywhere, matrices stored `[in, out]`."""

    model_type = "gpt2"
    title = "GPT-2"
    architectures = {"lm": "GPT2LMHeadModel", "none": "GPT2Model"}
    first_choice = True
    # The one field more says in what precision and order scores are computed.
    harmless = GPTLike.harmless | {"reorder_and_upcast_attn"}
    unsupported = frozenset({"add_cross_attention"})

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(
            **self.sizes(f),
            position=LearnedConfig(),
            attention=AttentionConfig(bias=EVERY, scale=None if f.get("scale_attn_weights", True) else 1.0),
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", True)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02), by_depth=True),
        )
        if not f.get("scale_attn_by_inverse_layer_idx", False):
            return plain
        scale = plain.attention.scale or plain.head_dim**-0.5
        return vary_layers(
            plain, attention=[plain.attention.replace(scale=scale / (i + 1)) for i in range(plain.num_layers)]
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.input_position, LearnedConfig), require_kind(config.norm, LayerNormConfig)
        usual = config.head_dim**-0.5
        first, last = (config.layer(i).attention.scale or usual for i in (0, config.num_layers - 1))
        return self.write_sizes(config, norm) | {
            "n_positions": position.max_length,
            "scale_attn_weights": first == usual,
            "scale_attn_by_inverse_layer_idx": first != last,
        }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("decoder.positions.0.weight", "transformer.wpe.weight")
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.ln_f")
        block, layer = "decoder.blocks.{i}", "transformer.h.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.ln_1")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.c_attn", Transposed(Parts("qkv")))
        yield from linear(f"{block}.attention.out", f"{layer}.attn.c_proj", Transposed())
        yield from linear(f"{block}.residual.norms.1", f"{layer}.ln_2")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.c_fc", Transposed())
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.c_proj", Transposed())


FAMILY = GPT2()
