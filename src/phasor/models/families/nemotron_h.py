"""Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Draft, Field, FieldEntry, Pinned, unsupported_part
from phasor.models.families._experts import OfMixture
from phasor.models.families._llama import KVHeads, plain_network
from phasor.models.families._mamba import WithMamba
from phasor.models.families._recurrent import LINEAR, OLD_TYPES
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL
from phasor.models.layout import OfKind, Rule, Transposed, linear, projections
from phasor.nn.attention.mamba2.config import Mamba2AttentionConfig
from phasor.nn.attention.none.config import NoAttentionConfig

PATTERN = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}  # the letters of layers

# Their sizes of layers with a state, ours, and what they are where a file has none.
SIZES = {
    "mamba_num_heads": ("num_heads", 128),
    "mamba_head_dim": ("value_dim", 64),
    "n_groups": ("num_key_heads", 8),
    "ssm_state_size": ("key_dim", 128),
    "conv_kernel": ("conv_width", 4),
    "use_conv_bias": ("conv_bias", True),
    "use_bias": ("bias", False),
}
MIXTURE = "feedforward.experts."


class SubLayers(FieldEntry):
    """`layers_block_type`, or `hybrid_override_pattern` of old: the one sub-layer of each layer.

    It stands below all other fields, but for how many layers there are, which `Depth` reads here.
    """

    def types(self, f: Fields, name: str) -> list[str]:
        """The types of layers, of which both fields say the same where a file has both."""
        letters = f.get("hybrid_override_pattern", "")
        listed = [PATTERN.get(letter, letter) for letter in letters]
        given = f.get(name, f.get("layer_types", listed or list(PATTERN.values())))
        types = [OLD_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in given]
        known = list(PATTERN.values())
        if listed and (listed != types or not set(listed) <= set(known)):
            raise ValueError(
                f"{f.file}: hybrid_override_pattern must have a letter of {' '.join(PATTERN)} for every layer, "
                f"and say what {name} says: it is {json_repr(letters)}"
            )
        if not types or not all(kind in known for kind in types):
            raise ValueError(f"{f.file}: {name} must list layers of {', '.join(known)}, not {json_repr(given)}")
        return types

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        types = self.types(f, name)
        if "moe" not in types:
            draft.values = {path: value for path, value in draft.values.items() if not path.startswith(MIXTURE)}
        elif draft["feedforward.bias"]:
            raise ValueError(f"{f.file}: mlp_bias is true, and the experts of layers of the type moe have no bias")
        config = draft.config()
        sizes = {ours: f.get(theirs, default) for theirs, (ours, default) in SIZES.items()}
        mixers = {LINEAR: Mamba2AttentionConfig(**sizes, norm_eps=draft["norm.eps"]), FULL: config.attention}
        networks = {"moe": config.feedforward, "mlp": config.feedforward.replace(experts=None)}
        draft.layers["attention"] = [mixers.get(kind, NoAttentionConfig()) for kind in types]
        draft.layers["feedforward"] = [networks.get(kind, FeedForwardConfig(hidden_dim=0)) for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        layers = [config.layer(i) for i in range(config.num_layers)]
        types = [self.type_of(layer.attention, layer.feedforward) for layer in layers]
        states = [layer.attention for layer in layers if isinstance(layer.attention, Mamba2AttentionConfig)]
        with_state = states[0].resolve(config) if states else None
        sizes = {theirs: getattr(with_state, ours, default) for theirs, (ours, default) in SIZES.items()}
        return {name: types} | sizes

    def type_of(self, attention: AttentionConfig, network: FeedForwardConfig) -> str:
        if attention.present and network.present:
            raise ValueError("its layers have attention or a feed-forward network, and not both")
        if network.present:
            return "mlp" if network.experts is None else "moe"
        if attention.kind not in ("mamba2", "softmax"):
            raise unsupported_part(attention)
        return LINEAR if attention.keeps_state else FULL


class Depth(SubLayers):
    """`num_hidden_layers`, which is as many as are listed."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        draft["num_layers"] = len(self.types(f, "layers_block_type"))
        f.expect(name, draft["num_layers"])

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {}


class NemotronH(WithMamba):
    """Layers of one sub-layer: Mamba-2, attention without positions, a network of squared ReLU, or experts of it."""

    model_type = "nemotron_h"
    title = "Nemotron-H, Nemotron 3"
    architectures = {"lm": "NemotronHForCausalLM", "none": "NemotronHModel"}
    prefix, class_prefix = "backbone.", "model."
    embedding = "backbone.embeddings.weight"
    experts_at = "mixer.experts"
    expert_parameters: ClassVar[dict[str, str]] = {"up": "up_proj", "down": "down_proj"}
    parts = WithMamba.parts | {
        "position": "none",
        "embedding.tied": False,
        f"{MIXTURE}scores": "sigmoid",
        f"{MIXTURE}correction": True,
    }
    fields: ClassVar[dict[str, FieldEntry]] = {
        "num_hidden_layers": Depth(),
        **{name: entry for name, entry in WithMamba.fields.items() if name != "num_hidden_layers"},
        "intermediate_size": Field("hidden_dim", default=21504),
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=128, fallback="attention_head_dim"),
        "max_position_embeddings": Field("max_length", default=4096),
        "mlp_hidden_act": Activation("relu2", ACTIVATIONS),
        "mlp_bias": Field("feedforward.bias", default=False),
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "tie_word_embeddings": Pinned(False),
        "n_routed_experts": OfMixture(f"{MIXTURE}num_experts", default=8, fallback="num_local_experts"),
        "num_experts_per_tok": OfMixture(f"{MIXTURE}top_k", default=2),
        "moe_intermediate_size": OfMixture(f"{MIXTURE}hidden_dim", default=7688),
        "moe_shared_expert_intermediate_size": OfMixture(f"{MIXTURE}shared_dim", default=7688),
        "n_shared_experts": Pinned(1),
        "moe_latent_size": OfMixture(f"{MIXTURE}latent_dim", default=None),
        "norm_topk_prob": OfMixture(f"{MIXTURE}normalize", default=True),
        "routed_scaling_factor": OfMixture(f"{MIXTURE}scale", default=1.0),
        "n_group": OfMixture(f"{MIXTURE}num_groups", default=1),
        "topk_group": OfMixture(f"{MIXTURE}top_groups", default=1),
        "attention_bias": Pinned(False),
        "mamba_proj_bias": Pinned(False),
        "mamba_hidden_act": Pinned("silu"),
        "layers_block_type": SubLayers(),
    }
    # How it is computed and initialized, which outputs are returned, layers that predict further tokens, and what
    # published files have of rotations, which there are none of, and once more of the norm.
    harmless = frozenset(
        """
        chunk_size expand hidden_dropout hybrid_override_pattern layer_types mamba_chunk_size mamba_dt_init_floor
        mamba_dt_limit mamba_dt_max mamba_dt_min mamba_expand mamba_ssm_cache_dtype moe_shared_expert_overlap
        mtp_hybrid_override_pattern mtp_layers_block_type norm_eps num_logits_to_keep
        num_nextn_predict_layers output_router_logits partial_rotary_factor rescale_prenorm_residual residual_in_fp32
        rms_norm_eps rope_theta time_step_floor time_step_max time_step_min use_mamba_kernels
        """.split()  # noqa: SIM905
    )
    unsupported = frozenset({"mamba_conv_bias", "mamba_d_conv", "mamba_n_groups"})  # other names of sizes
    passthrough = ("mtp.*",)

    def differs_from_transformers(self, config: ModelConfig) -> str:
        return (
            "transformers writes every token into the states of Mamba-2 at least as strongly as time_step_min says, "
            "which bounds initial weights"
        )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield from linear("head", "lm_head")
        yield from linear("decoder.norm", "backbone.norm_f")
        block, layer = "decoder.blocks.{i}", "backbone.layers.{i}"
        ours, mixer = f"{block}.attention", f"{layer}.mixer"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.norm")
        yield from projections(ours, mixer)
        yield from linear(f"{ours}.out", f"{mixer}.o_proj", OfKind("softmax"))
        yield from self.mamba(ours, mixer)
        network = f"{block}.feedforward"
        yield from plain_network(network, mixer)
        yield from plain_network(f"{network}.shared", f"{mixer}.shared_experts")
        yield from linear(f"{network}.router", f"{mixer}.gate")
        yield from linear(f"{network}.latent_down", f"{mixer}.fc1_latent_proj")
        yield from linear(f"{network}.latent_up", f"{mixer}.fc2_latent_proj")
        yield Rule(f"{network}.correction", f"{mixer}.gate.e_score_correction_bias")
        for name in ("up", "down"):
            yield Rule(f"{network}.{name}", f"{mixer}.experts.{{e}}.{name}_proj.weight", Transposed())


FAMILY = NemotronH()
