"""Random configurations of hybrids of Mamba-2 and softmax attention: Bamba, Granite 4 and Nemotron-H."""

from __future__ import annotations

import random
from typing import Any

import pytest
import transformers
from transformers.models.bamba import modeling_bamba
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.nemotron_h import modeling_nemotron_h

from .cases import Case, Cases, coin
from .delta import LINEAR, widen
from .llama_like import FULL, common_fields, hub_case, share_of_width
from .routed import correct, groups


def mamba_fields(rng: random.Random) -> dict[str, Any]:
    """Heads of odd widths in groups, which share a multiple of the model's width."""
    fields = common_fields(rng)
    groups, expand = rng.choice([1, 2]), rng.choice([1, 2])
    heads = rng.choice([n for n in (2, 4, 6, 8) if expand * fields["hidden_size"] % n == 0])
    return fields | {
        "hidden_act": "silu",
        "num_hidden_layers": rng.choice([3, 4]),
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": rng.choice([5, 8]),
        "mamba_d_head": rng.choice(["auto", expand * fields["hidden_size"] // heads]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_expand": expand,
        "mamba_chunk_size": rng.choice([7, 16]),
        "mamba_conv_bias": coin(rng),
        "mamba_proj_bias": coin(rng),
        "rms_norm_eps": rng.choice([1e-1, 1e-2]),  # small results of a state, normalized, would show their rounding
        "attention_bias": coin(rng),
    }


def layer_types(rng: random.Random, layers: int) -> list[str]:
    """Both kinds, in no order."""
    types = [LINEAR, FULL, *(rng.choice([LINEAR, FULL]) for _ in range(layers - 2))]
    rng.shuffle(types)
    return types


def correct_mixer(patch: pytest.MonkeyPatch, cls: Any) -> None:
    """States in float64, and no padding in the convolution."""
    widen(patch, cls)
    mask_projections(patch, cls)


def mask_projections(patch: pytest.MonkeyPatch, cls: Any) -> None:
    """Projections of padding that are zero: their bias would get into the convolution."""

    def forward(self: Any, *args: Any, own: Any = cls.forward, **more: Any) -> Any:
        mask = more.get("attention_mask")
        mask_padding = self.in_proj.register_forward_hook(lambda _, x, y: y if mask is None else y * mask[..., None])
        try:
            return own(self, *args, **more)
        finally:
            mask_padding.remove()

    patch.setattr(cls, "forward", forward)


def bamba(rng: random.Random, cls: str = "BambaForCausalLM") -> Case:
    fields = share_of_width(rng, mamba_fields(rng) | {"head_dim": rng.choice([16, 20])})  # half of it is rotated
    types = layer_types(rng, fields["num_hidden_layers"])
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rng.choice([500.0, 10000.0])}
    indices = [i for i, kind in enumerate(types) if kind == FULL]
    config = transformers.BambaConfig(**fields, attn_layer_indices=indices, mlp_bias=coin(rng))
    case = hub_case(rng, cls, config, drop=("time_step_limit",), attn_rotary_emb=64)
    case.patch = lambda patch: correct_mixer(patch, modeling_bamba.BambaMixer)
    return case


def granitemoehybrid(rng: random.Random, cls: str = "GraniteMoeHybridForCausalLM") -> Case:
    fields = share_of_width(rng, mamba_fields(rng))
    config = transformers.GraniteMoeHybridConfig(
        **fields,
        layer_types=layer_types(rng, fields["num_hidden_layers"]),
        attention_multiplier=rng.choice([0.2, 1.0]),
        residual_multiplier=rng.choice([0.3, 1.0]),
        embedding_multiplier=rng.choice([2.0, 12.0]),
        logits_scaling=rng.choice([0.7, 6.0]),
        num_local_experts=rng.choice([0, 4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        shared_intermediate_size=rng.choice([24, 40]),
        position_embedding_type=rng.choice([None, "rope", "nope"]),
    )
    unused = () if config.num_local_experts else ("intermediate_size", "num_experts_per_tok")
    unused += () if config.position_embedding_type == "rope" else ("position_embedding_type", "rope_parameters")
    case = hub_case(rng, cls, config, unused, ("time_step_limit",), init_method="mup", normalization_function="rmsnorm")
    case.patch = lambda patch: correct_mixer(patch, modeling_granitemoehybrid.GraniteMoeHybridMambaLayer)
    return case


LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def nemotron_h(rng: random.Random, cls: str = "NemotronHForCausalLM", kinds: str = "M*-E") -> Case:
    """Layers of all kinds in any order, several of a kind in a row too."""
    fields = {name: value for name, value in mamba_fields(rng).items() if not name.startswith("mamba_")}
    for name in ("rope_parameters", "tie_word_embeddings", "hidden_act", "attention_bias", "rms_norm_eps"):
        del fields[name]
    letters = [*kinds, *(rng.choice(kinds) for _ in range(rng.choice([0, 2])))]
    rng.shuffle(letters)
    mixture = {name: value for name, value in groups(rng).items() if name != "first_k_dense_replace"}
    key_heads = rng.choice([1, 2, 3])
    config = transformers.NemotronHConfig(
        **fields | mixture | {"num_hidden_layers": len(letters), "n_shared_experts": 1},
        layers_block_type=[LETTERS[letter] for letter in letters],
        mamba_num_heads=key_heads * rng.choice([1, 2]),
        mamba_head_dim=rng.choice([6, 7]),
        n_groups=key_heads,
        ssm_state_size=rng.choice([5, 8]),
        conv_kernel=rng.choice([2, 4]),
        chunk_size=rng.choice([7, 16]),
        use_conv_bias=coin(rng),
        use_bias=coin(rng),
        mlp_bias="E" not in kinds,
        mlp_hidden_act=rng.choice(["relu2", "silu"]),
        moe_shared_expert_intermediate_size=rng.choice([12, 28]),
        moe_latent_size=rng.choice([None, 12]) if "E" in kinds else None,
        layer_norm_epsilon=rng.choice([1e-1, 1e-2]),  # small results of a state, normalized, would show their rounding
    )
    config._experts_implementation = "eager"  # the only one that float64 has
    case = Case(getattr(transformers, cls), config)
    if coin(rng):
        case.older = lambda data: in_letters(data, letters)
        case.may_differ = ("rope_theta", "norm_eps", "partial_rotary_factor")
    case = correct(case)
    case.patch = unclamped
    if "E" not in kinds:
        case.may_differ += tuple(name for name in mixture if name != "n_shared_experts")
        case.may_differ += ("moe_shared_expert_intermediate_size",)
    return case


def in_letters(data: dict[str, Any], letters: list[str]) -> dict[str, Any]:
    """As published: layers by letters, and fields that nothing reads."""
    del data["layers_block_type"], data["time_step_limit"]
    data["torch_dtype"] = data.pop("dtype")
    unused = {"rope_theta": 10000, "norm_eps": 1e-5, "partial_rotary_factor": 1.0}
    return data | unused | {"hybrid_override_pattern": "".join(letters), "num_hidden_layers": len(letters)}


def unclamped(patch: pytest.MonkeyPatch) -> None:
    """How strongly tokens are written is not bounded below, as where the models were trained."""
    mixer = modeling_nemotron_h.NemotronHMamba2Mixer
    correct_mixer(patch, mixer)

    def init(self: Any, config: Any, *more: Any, own: Any = mixer.__init__, **options: Any) -> None:
        own(self, config, *more, **options)
        self.time_step_limit = (0.0, float("inf"))

    patch.setattr(mixer, "__init__", init)


CASES: Cases = {
    "bamba": bamba,
    "bamba/without head": lambda rng: bamba(rng, "BambaModel"),
    "granitemoehybrid": granitemoehybrid,
    "granitemoehybrid/without head": lambda rng: granitemoehybrid(rng, "GraniteMoeHybridModel"),
    "nemotron_h": nemotron_h,
    "nemotron_h/without experts": lambda rng: nemotron_h(rng, kinds="M*-"),
    "nemotron_h/without head": lambda rng: nemotron_h(rng, "NemotronHModel"),
}
