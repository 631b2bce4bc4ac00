"""Gemma 4, its text models: wider heads in global layers, whose values may be their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Draft, Field, FieldEntry, Pinned
from phasor.models.families._gemma import AROUND, GemmaLike
from phasor.models.families._llama import KVHeads
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL, SLIDING, LayerTypes
from phasor.models.layout import Rule
from phasor.models.rope import RopeParametersByLayer
from phasor.nn.attention import SoftmaxAttentionConfig

GLOBAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
HEADS = {"head_dim": "attention.head_dim", "num_key_value_heads": "attention.num_kv_heads"}


def attentions(config: ModelConfig) -> list[SoftmaxAttentionConfig]:
    """The attention of every layer."""
    layers = (config.layer(i).attention for i in range(config.num_layers))
    return [attention for attention in layers if isinstance(attention, SoftmaxAttentionConfig)]


class GlobalLast(LayerTypes):
    """`layer_types`, of which the last is global, whatever a file says."""

    def __init__(self) -> None:
        super().__init__(lambda f, draft, i: (i + 1) % 6 != 0, absent=512)

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        draft.layers["attention.window"] = [*draft.layers["attention.window"][:-1], None]


class ValueIsKey(FieldEntry):
    """`attention_k_eq_v`: whether the values of global layers are their keys; stands below `layer_types`."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        tied = f.get(name, False)
        draft.layers["attention.value_is_key"] = [
            tied and window is None for window in draft.layers["attention.window"]
        ]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: attentions(config)[-1].value_is_key}


class LayerHeads(FieldEntry):
    """`per_layer_config`: the width and the number of key/value heads of layers where they are not the model's.

    Other files have `global_head_dim`, and `num_global_key_value_heads` for layers whose values are keys.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        windows, tied = draft.layers["attention.window"], draft.layers["attention.value_is_key"]
        usual = {"head_dim": f.positive("global_head_dim", 512)}
        if any(tied) and (heads := f.get("num_global_key_value_heads", None)) is not None:
            usual["num_key_value_heads"] = heads
        f.get("num_global_key_value_heads", None)
        by_layer = f.get(name, {str(i): usual for i, window in enumerate(windows) if window is None})
        known = {str(i) for i in range(len(windows))}
        if not by_layer.keys() <= known or not all(own.keys() <= HEADS.keys() for own in by_layer.values()):
            raise ValueError(
                f"{f.file}: {name} must have {' and '.join(HEADS)} by the numbers of layers, not {json_repr(by_layer)}"
            )
        for field, path in HEADS.items():
            draft.layers[path] = [by_layer.get(str(i), {}).get(field) for i in range(len(windows))]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        found = {}
        for index, attention in enumerate(attentions(config)):
            own = dict(zip(HEADS, attention.heads_of(config), strict=True))
            usual = {"head_dim": config.head_dim, "num_key_value_heads": config.num_kv_heads}
            changed = {field: value for field, value in own.items() if value != usual[field]}
            if changed:
                found[str(index)] = changed
        return {name: found}


class Gemma4(GemmaLike):
    """Scores are not scaled, queries, keys and values are normalized, and a block's output is scaled."""

    model_type = "gemma4_text"
    title = "Gemma 4 (text)"
    architectures = {"lm": "Gemma4ForCausalLM", "none": "Gemma4TextModel"}
    norms = AROUND
    parts = GemmaLike.parts | {
        "norm.unit_offset": False,
        "placement": "sandwich",
        "placement.block_scale": True,
        "attention.qk_norm": "head",
        "attention.v_norm": True,
        "attention.scale": 1.0,
    }
    fields = GemmaLike.fields | {
        "num_key_value_heads": KVHeads(4),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_activation": Activation("gelu_pytorch_tanh", GATES),
        "final_logit_softcapping": Field("head.softcap", default=None),
        "use_bidirectional_attention": Pinned(None, "vision"),
        "layer_types": GlobalLast(),
        "attention_k_eq_v": ValueIsKey(),
        "per_layer_config": LayerHeads(),
        "rope_parameters": RopeParametersByLayer(
            {FULL: (None, 1e4), SLIDING: (None, 1e4)}, usual={FULL: GLOBAL, SLIDING: LOCAL}
        ),
        "hidden_size_per_layer_input": Pinned(0, written=True),
        "num_kv_shared_layers": Pinned(0),
        "use_double_wide_mlp": Pinned(False),
        "enable_moe_block": Pinned(False),
    }
    harmless = frozenset({"vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"})

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        yield Rule("decoder.blocks.{i}.scale", "model.layers.{i}.layer_scalar")


FAMILY = Gemma4()
