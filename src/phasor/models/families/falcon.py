"""Falcon: 7B, 40B, 180B, the 11B of Falcon 2, and the RW models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig, ParallelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Bias, Draft, Field, FieldEntry, InitStd, Pinned
from phasor.models.families._megatron import block
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters
from phasor.nn.positions import ALiBiConfig


class DecoderArchitecture(FieldEntry):
    """`new_decoder_architecture`: the newer one is parallel with one norm or two, and counts key/value heads.

    The older one is parallel with one norm, or sequential, and has one key/value head, or one per query head.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        heads = draft["num_heads"]
        several, given = not f.get("multi_query", True), f.get("num_kv_heads", heads)
        if f.get(name, False):
            f.expect("parallel_attn", True)
            f.expect("num_ln_in_parallel_attn", 2, 1)
            one_norm = f.get("num_ln_in_parallel_attn", 2) == 1
            draft.values |= {"placement": "parallel", "placement.shared_norm": one_norm, "num_kv_heads": given}
            return
        f.expect("num_ln_in_parallel_attn", 1)
        if several:
            f.expect("num_kv_heads", heads)
        draft["placement"] = "parallel" if f.get("parallel_attn", True) else "pre"
        draft["num_kv_heads"] = heads if several else 1

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        groups, two = config.num_kv_heads, has_two_norms(config)
        fields: dict[str, Any] = {"parallel_attn": isinstance(config.placement, ParallelConfig)}
        if two or groups not in (1, config.num_heads):
            return fields | {name: True, "num_ln_in_parallel_attn": 2 if two else 1, "num_kv_heads": groups}
        return fields | {"multi_query": groups == 1 and config.num_heads > 1}


def has_two_norms(config: ModelConfig) -> bool:
    """Whether attention and feed-forward have a norm each, in parallel."""
    return isinstance(config.placement, ParallelConfig) and not config.placement.shared_norm


class RotaryOrALiBi(RopeParameters):
    """Rotary, or ALiBi that is divided together with the scores, as in the default attention of transformers."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if not f.get("alibi", False):
            super().read(f, name, draft)
            return
        for unused in (name, "rope_theta", "rope_scaling"):
            f.get(unused, None)
        draft["position"] = ALiBiConfig(multiplier=draft["head_dim"] ** -0.5)

    def check(self, config: ModelConfig) -> None:
        if not isinstance(config.position, ALiBiConfig):
            super().check(config)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        alibi = isinstance(config.position, ALiBiConfig)
        return {"alibi": alibi} | ({} if alibi else super().write(name, config))


class Falcon(Family):
    """Multi-query, parallel after one norm (7B); grouped heads, one norm or two (40B); ALiBi, sequential (RW)."""

    model_type = "falcon"
    title = "Falcon"
    architectures = {"lm": "FalconForCausalLM", "none": "FalconModel"}
    aliases = {"RWForCausalLM": "lm"}
    prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    parts = Family.parts | {"norm": "layernorm"}
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim", alias="n_embed"),
        "ffn_hidden_size": Field("hidden_dim", default=None),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": Field("max_length", default=2048),
        "bias": Bias(False, feedforward=True),
        "activation": Activation("gelu", ACTIVATIONS),
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "hidden_dropout": Field("dropout.residual", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "apply_residual_connection_post_layernorm": Pinned(False),
        "new_decoder_architecture": DecoderArchitecture(),
        "rope_parameters": RotaryOrALiBi(),
    }
    harmless = frozenset({"ff_factor"})  # the ratio of two sizes

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        if not isinstance(config.position, ALiBiConfig):
            return None
        return (
            "transformers rounds ALiBi to bfloat16, and phasor does not: it follows the formula in float32, which the "
            "default attention of transformers (sdpa) comes near to"
        )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.ln_f")
        norms = ("ln_attn", "ln_mlp") if has_two_norms(config) else ("input_layernorm", "post_attention_layernorm")
        yield from block("transformer.h.{i}", "self_attention", norms)


FAMILY = Falcon()
