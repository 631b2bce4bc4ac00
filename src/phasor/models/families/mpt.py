"""MPT 7B and 30B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, InitStd, Nested, Pinned, SameAs, require_kind
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, linear
from phasor.nn.positions import ALiBiConfig


class SequenceLength(Field):
    """The trained length; with one of 1, the ALiBi of transformers has a single entry, and so no distances."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if draft["max_length"] == 1:
            raise ValueError(f"{f.file}: {name} must be at least 2, not 1")


class MaxBias(Field):
    """The slopes follow `alibi_bias_max`, as the models were trained; transformers always computes them for 8."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        max_bias = require_kind(draft.config().position, ALiBiConfig).max_bias
        if max_bias != 8:
            text = f"{f.prefix}{name} is {max_bias:g}, and phasor follows it, as the model was trained"
            f.note(f"{text}; transformers computes with 8 all the same")

    def encode(self, value: Any, config: ModelConfig) -> Any:
        if value != int(value):
            raise ValueError(f"its alibi_bias_max is an integer, not {value}")
        return int(value)


class Clip(Field):
    """What queries, keys and values are clipped to; 0 is nothing."""

    def decode(self, value: Any, draft: Draft) -> Any:
        return value or None


class Dropout(Field):
    """Dropout of scores and outputs; it is not written, since transformers takes nothing but an integer there."""

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {}


class MPT(Family):
    """Pre-norm with ALiBi, no biases anywhere, queries, keys and values clipped where the file says so."""

    model_type = "mpt"
    title = "MPT"
    architectures = {"lm": "MptForCausalLM", "none": "MptModel"}
    aliases = {"MPTForCausalLM": "lm"}
    prefix = "transformer."
    embedding = "transformer.wte.weight"
    parts = Family.parts | {
        "position": "alibi",
        "feedforward.activation": "gelu",
        "norm": "layernorm",
        "norm.bias": False,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "d_model": Field("dim", alias="hidden_size"),
        "n_layers": Field("num_layers", alias="num_hidden_layers"),
        "n_heads": Field("num_heads", alias="num_attention_heads"),
        "expansion_ratio": Pinned(4),
        "max_seq_len": SequenceLength("max_length", default=2048),
        "no_bias": Pinned(True),
        "norm_type": Pinned("low_precision_layernorm", "layernorm"),  # they differ under autocast alone
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "logit_scale": Pinned(None),
        "ffn_config": Nested({"ffn_type": Pinned("mptmlp")}, harmless={"fc_type"}),
        "attn_config": Nested(
            {
                "attn_type": Pinned("multihead_attention"),
                "alibi": Pinned(True, written=True),
                "alibi_bias_max": MaxBias("position.max_bias", default=8),
                "softmax_scale": Field("attention.scale", default=None),
                "clip_qkv": Clip("attention.clip", default=None),
                "attn_pdrop": Dropout("dropout.residual", "dropout.attention", default=0.0),
                "kv_n_heads": Pinned(SameAs("num_heads")),
                "sliding_window_size": Pinned(-1),
                **dict.fromkeys(("attn_uses_sequence_id", "prefix_lm", "qk_gn", "qk_ln", "rope"), Pinned(False)),
            },
            harmless={"attn_impl", "rope_dail_config", "rope_hf_config", "rope_impl", "rope_theta"},
        ),
    }
    # Device, kernels, gradients; dropout that transformers leaves out; a table of positions that ALiBi replaces.
    harmless = frozenset(
        """
        emb_pdrop embedding_fraction fc_type init_config init_device learned_pos_emb resid_pdrop tokenizer_name
        use_pad_tok_in_ffn verbose
        """.split()  # noqa: SIM905
    )

    def ignored_by_transformers(self, config: ModelConfig) -> list[str]:
        bias = require_kind(config.position, ALiBiConfig).max_bias
        return [] if bias == 8 else [f"position (max_bias is {bias:g}, and always 8 in transformers)"]

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


FAMILY = MPT()
