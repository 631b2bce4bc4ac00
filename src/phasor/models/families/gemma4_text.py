"""Gemma 4, its text models: wider heads in global layers, whose values may be their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Draft, Field, FieldEntry, Pinned, require_kind
from phasor.models.families._gemma import AROUND, GemmaLike
from phasor.models.families._llama import KVHeads
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL, SLIDING, LayerTypes
from phasor.models.layout import Rule, StackedTransposed, linear
from phasor.models.rope import RopeParametersByLayer
from phasor.nn.attention import SoftmaxAttentionConfig

GLOBAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_experts": "num_experts", "top_k_experts": "top_k", "moe_intermediate_size": "hidden_dim"}
BESIDE = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
HEADS = {"head_dim": "attention.head_dim", "num_key_value_heads": "attention.num_kv_heads"}


def attentions(config: ModelConfig) -> list[SoftmaxAttentionConfig]:
    """The attention of every layer."""
    layers = (config.layer(i).attention for i in range(config.num_layers))
    return [require_kind(attention, SoftmaxAttentionConfig) for attention in layers]


class GlobalLast(LayerTypes):
    """`layer_types`, of which the last is always global, also where a file says otherwise."""

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
        given = f.get(name, {str(i): usual for i, window in enumerate(windows) if window is None})
        numbers = [int(key) if str(key).isdecimal() else -1 for key in given]
        own = [fields if isinstance(fields, dict) else {"": fields} for fields in given.values()]
        if not {*numbers} <= {*range(len(windows))} or not all(fields.keys() <= HEADS.keys() for fields in own):
            raise ValueError(
                f"{f.file}: {name} must have {' and '.join(HEADS)} by the numbers of layers, not {json_repr(given)}"
            )
        by_layer = dict(zip(numbers, own, strict=True))
        for field, path in HEADS.items():
            draft.layers[path] = [by_layer.get(i, {}).get(field) for i in range(len(windows))]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        found = {}
        for index, attention in enumerate(attentions(config)):
            own = dict(zip(HEADS, attention.heads_of(config), strict=True))
            usual = {"head_dim": config.head_dim, "num_key_value_heads": config.num_kv_heads}
            changed = {field: value for field, value in own.items() if value != usual[field]}
            if changed:
                found[str(index)] = changed
        return {name: found}


class SharedLayers(FieldEntry):
    """`num_kv_shared_layers`, the last ones, and `use_double_wide_mlp`: whether their networks are twice as wide."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        count, width = draft["num_layers"], draft["hidden_dim"]
        shared = [index >= count - f.get(name, 0) for index in range(count)]
        wide = 2 * width if f.get("use_double_wide_mlp", False) else None
        draft.layers["attention.shared_kv"] = shared
        draft.layers["feedforward.hidden_dim"] = [wide if one else None for one in shared]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        widths = [config.layer(i).feedforward.hidden_dim_of(config) for i in range(config.num_layers)]
        shared = [attention.shared_kv for attention in attentions(config)]
        return {name: sum(shared), "use_double_wide_mlp": widths[-1] == 2 * config.hidden_dim}


class ExpertsBeside(FieldEntry):
    """`enable_moe_block`: experts beside the network of every layer; stands below `num_kv_shared_layers`."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if not f.get(name, False):
            return
        if any(width is not None for width in draft.layers["feedforward.hidden_dim"]):
            raise ValueError(f"{f.file}: phasor does not know networks of several widths beside experts")
        mixture = {ours: f.get(theirs) for theirs, ours in EXPERTS.items()} | {"shared_dim": draft["hidden_dim"]}
        mixture |= dict.fromkeys(("branch_norms", "router_norm", "expert_scale"), True)
        draft.values |= {f"feedforward.experts.{path}": value for path, value in mixture.items()}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        mixture = config.layer(0).feedforward.experts
        if mixture is None:
            return {name: False}
        sizes = {theirs: getattr(mixture, ours) for theirs, ours in EXPERTS.items()}
        return {name: True} | sizes | {"moe_intermediate_size": mixture.hidden_dim or config.hidden_dim}


class PerLayerWidth(FieldEntry):
    """`hidden_size_per_layer_input`, 0 for none, and the size of the vocabulary that has such vectors: all of it."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        draft["embedding.per_layer_width"] = f.get(name, 256) or None
        if draft["embedding.per_layer_width"] is not None:
            f.expect("vocab_size_per_layer_input", draft["vocab_size"])
        f.get("vocab_size_per_layer_input", None)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: config.embedding.per_layer_width or 0, "vocab_size_per_layer_input": config.vocab_size}


class Gemma4(GemmaLike):
    """Scores are not scaled, queries, keys and values are normalized, and a block's output is scaled."""

    model_type = "gemma4_text"
    title = "Gemma 4 (text)"
    experts_at = "experts"
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
        "hidden_size_per_layer_input": PerLayerWidth(),
        "num_kv_shared_layers": SharedLayers(),
        "enable_moe_block": ExpertsBeside(),
    }
    # Of files without experts.
    # The last follows from other fields.
    harmless = frozenset({"num_experts", "top_k_experts", "moe_intermediate_size", "kv_sharing_modes"})

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        block, layer = "decoder.blocks.{i}", "model.layers.{i}"
        yield Rule(f"{block}.scale", f"{layer}.layer_scalar")
        yield from linear(f"{block}.layer_input.gate", f"{layer}.per_layer_input_gate")
        yield from linear(f"{block}.layer_input.project", f"{layer}.per_layer_projection")
        yield from linear(f"{block}.layer_input.norm", f"{layer}.post_per_layer_input_norm")
        yield Rule("per_layer.weight", "model.embed_tokens_per_layer.weight")
        yield from linear("per_layer.project", "model.per_layer_model_projection")
        yield from linear("per_layer.norm", "model.per_layer_projection_norm")
        yield from self.mixture(f"{block}.feedforward", layer)

    def mixture(self, ours: str, layer: str) -> Iterator[Rule]:
        """Experts, and the network beside them."""
        yield from self.feedforward(f"{ours}.shared", f"{layer}.mlp")
        for index, norm in enumerate(BESIDE):
            yield from linear(f"{ours}.norms.{index}", f"{layer}.{norm}")
        yield from linear(f"{ours}.router", f"{layer}.router.proj")
        yield Rule(f"{ours}.router_norm.weight", f"{layer}.router.scale")
        yield Rule(f"{ours}.expert_scale", f"{layer}.router.per_expert_scale")
        yield Rule(f"{ours}.up", f"{layer}.experts.gate_up_proj", StackedTransposed())
        yield Rule(f"{ours}.down", f"{layer}.experts.down_proj", StackedTransposed())

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        """The keys and values of layers that share those of others."""
        shared = (index for index, attention in enumerate(attentions(config)) if attention.shared_kv)
        return tuple(f"model.layers.{index}.self_attn.[kv]_*" for index in shared)


FAMILY = Gemma4()
