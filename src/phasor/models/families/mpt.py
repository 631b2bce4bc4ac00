"""MPT 7B and 30B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    GELUConfig,
    LayerNormConfig,
    ModelConfig,
    NormalInitConfig,
)
from phasor.models.families._gpt import either, plain_head
from phasor.models.family import Family, require_kind
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Parts, Rule, linear
from phasor.nn.positions import ALiBiConfig


class MPT(Family):
    """Pre-norm with ALiBi, no biases anywhere, queries, keys and values clipped where the file says so.

    The slopes follow `alibi_bias_max`, as the models were trained; transformers computes them for 8 whatever it is.
    """

    model_type = "mpt"
    title = "MPT"
    architectures = {"lm": "MptForCausalLM", "none": "MptModel"}
    aliases = {"MPTForCausalLM": "lm"}
    prefix = "transformer."
    embedding = "transformer.wte.weight"
    # Device, kernels, gradients; dropout that transformers leaves out; a table of positions that ALiBi replaces.
    harmless = frozenset(
        """
        emb_pdrop embedding_fraction fc_type init_config init_device learned_pos_emb resid_pdrop tokenizer_name
        use_pad_tok_in_ffn verbose
        """.split()  # noqa: SIM905
    )

    def read(self, f: Fields) -> ModelConfig:
        f.expect("expansion_ratio", 4)
        f.expect("no_bias", True)
        f.expect("logit_scale", None)
        f.expect("norm_type", "low_precision_layernorm", "layernorm")  # they differ under autocast alone
        plain = ModelConfig(
            vocab_size=f.get("vocab_size"),
            dim=either(f, "d_model", "hidden_size"),
            num_layers=either(f, "n_layers", "num_hidden_layers"),
            num_heads=either(f, "n_heads", "num_attention_heads"),
            max_length=self.read_length(f),
            feedforward=FeedForwardConfig(activation=GELUConfig()),
            norm=LayerNormConfig(eps=f.get("layer_norm_epsilon", 1e-5), bias=False),
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", True)),
            head=plain_head(self.head_kind(f)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02)),
        )
        network = read_object(f, "ffn_config")
        network.expect("ffn_type", "mptmlp")
        network.finish({"fc_type"})
        return self.read_attention(read_object(f, "attn_config"), plain)

    def read_length(self, f: Fields) -> int:
        """The trained length; with one of 1, the ALiBi of transformers has a single entry, and so no distances."""
        length: int = f.get("max_seq_len", 2048)
        if length == 1:
            raise ValueError(f"{f.file}: max_seq_len must be at least 2, not 1")
        return length

    def read_attention(self, a: Fields, plain: ModelConfig) -> ModelConfig:
        """What `attn_config` says of a model."""
        a.expect("attn_type", "multihead_attention")
        a.expect("alibi", True)
        a.expect("kv_n_heads", plain.num_heads)
        a.expect("sliding_window_size", -1)
        for unknown in ("attn_uses_sequence_id", "prefix_lm", "qk_gn", "qk_ln", "rope"):
            a.expect(unknown, False)
        position = ALiBiConfig(max_bias=a.get("alibi_bias_max", 8))
        if position.max_bias != 8:
            text = (
                f"attn_config.alibi_bias_max is {position.max_bias:g}, and phasor follows it, as the model was trained"
            )
            a.note(f"{text}; transformers computes with 8 whatever the file says")
        attention = AttentionConfig(scale=a.get("softmax_scale", None), clip=a.get("clip_qkv", None) or None)
        dropped = a.get("attn_pdrop", 0.0)
        a.finish({"attn_impl", "rope_dail_config", "rope_hf_config", "rope_impl", "rope_theta"})
        dropout = DropoutConfig(attention=dropped, residual=dropped)
        return plain.replace(position=position, attention=attention, dropout=dropout)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, ALiBiConfig), require_kind(config.norm, LayerNormConfig)
        if position.max_bias != int(position.max_bias):
            raise ValueError(f"its alibi_bias_max is an integer, not {position.max_bias}")
        return {
            "vocab_size": config.vocab_size,
            "d_model": config.dim,
            "n_layers": config.num_layers,
            "n_heads": config.num_heads,
            "max_seq_len": config.max_length,
            "layer_norm_epsilon": norm.eps,
            "initializer_range": getattr(config.init, "std", 0.02),
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": int(position.max_bias),
                "softmax_scale": config.attention.scale,
                "clip_qkv": config.attention.clip,
            },
        }

    def ignored_by_transformers(self, config: ModelConfig) -> list[str]:
        bias = require_kind(config.position, ALiBiConfig).max_bias
        return [] if bias == 8 else [f"position (max_bias is {bias:g}, and 8 in transformers whatever the file says)"]

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        return next(iter(self.ignored_by_transformers(config)), None)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.norm_f")
        block, layer = "decoder.blocks.{i}", "transformer.blocks.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.norm_1")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.Wqkv", Parts("qkv"))
        yield from linear(f"{block}.attention.out", f"{layer}.attn.out_proj")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.norm_2")
        yield from linear(f"{block}.feedforward.up", f"{layer}.ffn.up_proj")
        yield from linear(f"{block}.feedforward.down", f"{layer}.ffn.down_proj")


def read_object(f: Fields, name: str) -> Fields:
    """An object inside the file's."""
    given = f.get(name, {})
    if not isinstance(given, dict):
        raise ValueError(f"{f.file}: {name} must be an object, not {json_repr(given)}")
    return f.inside(given, f"{name}.")


FAMILY = MPT()
