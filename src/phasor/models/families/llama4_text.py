"""Llama 4, its text part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ChunkedConfig, ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Draft, Field, FieldEntry, get_path, require_kind
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.families.smollm3 import RotaryLayers
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.nn.positions import NoPositionConfig, RotaryConfig, TemperatureConfig

CHUNKED = "chunked_attention"


class ListedExpertLayers(FieldEntry):
    """`moe_layers`, those with experts; where there is no list, every `interleave_moe_layer_step`-th."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config, step = draft.config(), f.positive("interleave_moe_layer_step", 1)
        layers = f.get(name, [i for i in range(config.num_layers) if (i + 1) % step == 0])
        mixture = config.feedforward.experts
        draft.layers["feedforward.experts"] = [mixture if i in layers else None for i in range(config.num_layers)]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        networks = [config.layer(i).feedforward for i in range(config.num_layers)]
        return {name: [i for i, network in enumerate(networks) if network.experts is not None]}


class PlacedLayers(RotaryLayers):
    """`no_rope_layers`, as in SmolLM3, an empty list being none: rotary layers may normalize what is rotated.

    The others may have a temperature.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        data = {n: value for n, value in f.data.items() if n != name or value != []}
        super().read(f.inside(data), name, draft)
        f.taken |= {name, "no_rope_layer_interval"}
        scale, length = f.get("attn_scale", 0.1), f.positive("floor_scale", 8192)
        temperature = TemperatureConfig(form="floor", scale=scale, floor_length=length) if scale else NoPositionConfig()
        other = temperature if f.get("attn_temperature_tuning", True) else NoPositionConfig()
        normed = f.get("use_qk_norm", True)
        rotary = [isinstance(position, RotaryConfig) for position in draft.layers["position"]]
        draft.layers["position"] = [draft["position"] if one else other for one in rotary]
        for field, value in (("qk_norm", "head"), ("qk_norm_weight", False), ("qk_norm_after_positions", True)):
            usual = getattr(SoftmaxAttentionConfig, field)
            draft.layers[f"attention.{field}"] = [value if one and normed else usual for one in rotary]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        layers = [config.layer(i) for i in range(config.num_layers)]
        normed = any(getattr(layer.attention, "qk_norm", "none") != "none" for layer in layers)
        fields = super().write(name, config) | {"use_qk_norm": normed}
        found = next((layer.position for layer in layers if isinstance(layer.position, TemperatureConfig)), None)
        fields["attn_temperature_tuning"] = found is not None or all(fields[name])
        if found is not None:
            fields |= {"attn_scale": found.chosen_scale, "floor_scale": found.floor_length}
        return fields


class ChunkedLayers(FieldEntry):
    """`layer_types`, below `no_rope_layers`: which layers attend to chunks of `attention_chunk_size` tokens alone."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        positions, chunk = draft.layers["position"], ChunkedConfig(chunk=f.get("attention_chunk_size", 8192))
        types = f.get(name, [CHUNKED if isinstance(position, RotaryConfig) else FULL for position in positions])
        if len(types) != len(positions) or not set(types) <= {CHUNKED, FULL}:
            wanted = f"{len(positions)} times {FULL} or {CHUNKED}"
            raise ValueError(f"{f.file}: {name} must be {wanted}, not {json_repr(types)}")
        draft.layers["attention.sparse"] = [chunk if kind == CHUNKED else None for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        layers = [require_kind(config.layer(i).attention, SoftmaxAttentionConfig) for i in range(config.num_layers)]
        chunks = [layer.sparse for layer in layers]
        fields: dict[str, Any] = {name: [FULL if chunk is None else CHUNKED for chunk in chunks]}
        found = next((chunk for chunk in chunks if chunk is not None), None)
        return fields if found is None else fields | {"attention_chunk_size": require_kind(found, ChunkedConfig).chunk}


class SharedWidth(Field):
    """`intermediate_size`, the width of routed and shared experts."""

    def __init__(self) -> None:
        super().__init__("feedforward.experts.hidden_dim", "feedforward.experts.shared_dim")

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return get_path(config, "feedforward.experts.shared_dim") if value is None else value


class Llama4Text(LlamaLike):
    """Chunked rotary layers, global ones with a temperature, one of many experts beside a shared one."""

    model_type = "llama4_text"
    title = "Llama 4 (text)"
    experts_at = "feed_forward.experts"
    swaps_expert_factors = True
    architectures = {"lm": "Llama4ForCausalLM", "none": "Llama4TextModel"}
    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "feedforward.experts.scores": "sigmoid",
        "feedforward.experts.normalize": False,
        "feedforward.experts.weight_inputs": True,
    }
    fields = {
        "num_local_experts": Field("feedforward.experts.num_experts", default=16),
        **LlamaLike.fields,
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=131072),
        "intermediate_size": SharedWidth(),
        "intermediate_size_mlp": Field("hidden_dim", default=16384),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=1),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(base=500000.0, pairing="adjacent"),
        "moe_layers": ListedExpertLayers(),
        "no_rope_layers": PlacedLayers(),
        "layer_types": ChunkedLayers(),
    }
    # Which outputs are returned, a loss and noise in training; how caches were made, and a way of quantizing.
    harmless = frozenset(
        {
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "for_llm_compressor",
            "cache_implementation",
        }
    )

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        theirs = f"{theirs.removesuffix('mlp')}feed_forward"
        yield from super().feedforward(ours, theirs)
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_expert")
        yield from linear(f"{ours}.router", f"{theirs}.router")
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj")
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj")


FAMILY = Llama4Text()
