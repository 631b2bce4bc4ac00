"""GPT-J 6B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    EmbeddingConfig,
    LanguageHeadConfig,
    LayerNormConfig,
    ModelConfig,
    NormalInitConfig,
    ParallelConfig,
)
from phasor.models.families._gpt import GPTLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import RotaryConfig


class GPTJ(GPTLike):
    """Parallel after one norm, adjacent pairs of part of a head, biases in the feed-forward network and the head."""

    model_type = "gptj"
    title = "GPT-J"
    architectures = {"lm": "GPTJForCausalLM", "none": "GPTJModel"}

    def read(self, f: Fields) -> ModelConfig:
        f.set_defaults({"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})
        f.expect("rotary", True)
        f.expect("scale_attn_weights", True)
        plain = ModelConfig(**self.sizes(f))
        return plain.replace(
            head=LanguageHeadConfig(bias=True) if plain.has_logits else plain.head,
            position=RotaryConfig(rotary_dim=f.get("rotary_dim", 64), pairing="adjacent"),
            placement=ParallelConfig(),
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", False)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        fields = self.write_sizes(config, require_kind(config.norm, LayerNormConfig))
        return fields | {"rotary_dim": position.rotary_dim_of(config.head_dim)}

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield from linear("head", "lm_head")
        yield from linear("decoder.norm", "transformer.ln_f")
        block, layer = "decoder.blocks.{i}", "transformer.h.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.ln_1")
        yield from projections(f"{block}.attention", f"{layer}.attn")
        yield from linear(f"{block}.attention.out", f"{layer}.attn.out_proj")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.fc_in")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.fc_out")


FAMILY = GPTJ()
