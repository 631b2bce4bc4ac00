"""Random configurations of further decoders, most of them with Llama's names: OLMo, EXAONE, Seed-OSS, XGLM, ..."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import transformers

from . import gpt
from .cases import TRAINED, Case, Cases, coin, mixed_layer_types, partial_rotary_factor, rope
from .llama_like import FULL, SLIDING, common_fields, eps, hub_case, share_of_width

BETA = "llama_4_scaling_beta"


def listed_or_ruled(rng: random.Random, depth: int, **rule: Any) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Windows by a list of layers or by the family's rule, whose fields an older file has in place of the list.

    The rule comes back as the list.
    """
    fields: dict[str, Any] = {"sliding_window": rng.choice([7, 19])}
    if coin(rng):
        return fields | rule, {"drop": ("layer_types",), "listed": tuple(rule)}
    return fields | {"layer_types": mixed_layer_types(rng, depth)}, {}


def olmo3(rng: random.Random, cls: str = "Olmo3ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    sizes["rope_parameters"] = {FULL: rope(rng), SLIDING: rope(rng, ("default", "linear"))}
    fields, _ = listed_or_ruled(rng, sizes["num_hidden_layers"])
    config = transformers.Olmo3Config(**sizes, **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return Case(getattr(transformers, cls), config)


def olmo3_of_old(rng: random.Random) -> Case:
    """The rotary base and an extension apart; the extension is that of global layers."""
    case = olmo3(rng)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20}
    scaling |= {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}

    def older(data: dict[str, Any]) -> dict[str, Any]:
        del data["rope_parameters"]
        return data | {"rope_theta": 500000, "rope_scaling": scaling}

    case.older = older
    return case


def exaone4(rng: random.Random, cls: str = "Exaone4ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    fields, spelled = listed_or_ruled(rng, sizes["num_hidden_layers"], sliding_window_pattern=rng.choice([2, 3]))
    config = transformers.Exaone4Config(**sizes, **fields, rms_norm_eps=eps(rng))
    return hub_case(rng, cls, config, may_differ=("sliding_window_pattern",), **spelled)


def exaone4_without_windows(rng: random.Random) -> Case:
    """A null window: every layer is global, and rotary."""
    sizes = common_fields(rng)
    layers = [FULL] * sizes["num_hidden_layers"]
    config = transformers.Exaone4Config(**sizes, rms_norm_eps=eps(rng), sliding_window=None, layer_types=layers)
    return hub_case(rng, "Exaone4ForCausalLM", config, may_differ=("sliding_window_pattern",))


def hunyuan(rng: random.Random, cls: str = "HunYuanDenseV1ForCausalLM", **fields: Any) -> Case:
    sizes = common_fields(rng)
    if coin(rng):
        sizes["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}
    name = cls.removesuffix("ForCausalLM").removesuffix("Model")
    config = getattr(transformers, f"{name}Config")(**sizes, **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return hub_case(rng, cls, config, use_qk_norm=True, use_cla=False)


def hunyuan_moe(rng: random.Random, cls: str = "HunYuanMoEV1ForCausalLM") -> Case:
    return hunyuan(rng, cls, num_experts=rng.choice([4, 6]), moe_topk=rng.choice([1, 2, 3]))


def cohere2(rng: random.Random, cls: str = "Cohere2ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    rule = {"sliding_window_pattern": rng.choice([2, 3])}
    fields, spelled = listed_or_ruled(rng, sizes["num_hidden_layers"], **rule)
    config = transformers.Cohere2Config(
        **sizes,
        **fields,
        layer_norm_eps=eps(rng),
        attention_bias=coin(rng),
        logit_scale=rng.choice([0.5, 2.0]),
    )
    return hub_case(rng, cls, config, **spelled, **(rule if spelled else {}))


def seed_oss(rng: random.Random, cls: str = "SeedOssForCausalLM") -> Case:
    config = transformers.SeedOssConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        attention_out_bias=coin(rng),
        mlp_bias=coin(rng),
        attention_dropout=0.2,
        residual_dropout=0.3,
    )
    return hub_case(rng, cls, config)


def drop_kv_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    """For families in which all heads have their own keys and values, and their share of the width."""
    return {name: value for name, value in sizes.items() if name not in ("num_key_value_heads", "head_dim")}


def squared(rng: random.Random) -> dict[str, Any]:
    """Fields of families whose network has no gate."""
    return common_fields(rng) | {"hidden_act": rng.choice(["relu2", "relu2", "gelu", "relu"])}


def arcee(rng: random.Random, cls: str = "ArceeForCausalLM") -> Case:
    config = transformers.ArceeConfig(
        **squared(rng), rms_norm_eps=eps(rng), attention_bias=coin(rng), mlp_bias=coin(rng)
    )
    return hub_case(rng, cls, config)


def apertus(rng: random.Random, cls: str = "ApertusForCausalLM") -> Case:
    """The constants of xIELU are buffers of the file, redrawn as its weights are."""
    sizes = share_of_width(rng, squared(rng)) | {"hidden_act": rng.choice(["xielu", "xielu", "relu2"])}
    config = transformers.ApertusConfig(**sizes, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    case = hub_case(rng, cls, config, mlp_bias=False, qk_norm=True, post_norm=False)
    case.buffers = lambda name: name.endswith(("act_fn.beta", "act_fn.eps"))

    def constants(model: Any) -> None:
        for name, buffer in model.named_buffers():
            if case.buffers(name):
                buffer.fill_(rng.choice([0.3, 0.5]) if name.endswith("beta") else rng.choice([-1e-6, -0.1]))

    case.touch = constants
    return case


def nemotron(rng: random.Random, cls: str = "NemotronForCausalLM") -> Case:
    sizes = squared(rng)
    sizes["rope_parameters"]["partial_rotary_factor"] = partial_rotary_factor(rng, sizes)
    config = transformers.NemotronConfig(
        **sizes, norm_eps=eps(rng), attention_bias=coin(rng), mlp_bias=coin(rng), attention_dropout=0.1
    )
    return hub_case(rng, cls, config)


def persimmon(rng: random.Random, cls: str = "PersimmonForCausalLM") -> Case:
    sizes = drop_kv_heads(squared(rng))
    sizes["rope_parameters"]["partial_rotary_factor"] = partial_rotary_factor(rng, sizes)
    config = transformers.PersimmonConfig(**sizes, layer_norm_eps=eps(rng), qk_layernorm=coin(rng))
    return hub_case(rng, cls, config)


def helium(rng: random.Random, cls: str = "HeliumForCausalLM") -> Case:
    """The heads' width is their share: the output projection is square."""
    sizes = common_fields(rng)
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    config = transformers.HeliumConfig(**sizes, rms_norm_eps=eps(rng), attention_bias=coin(rng), mlp_bias=coin(rng))
    return hub_case(rng, cls, config)


def olmo(rng: random.Random, cls: str = "OlmoForCausalLM") -> Case:
    config = transformers.OlmoConfig(
        **share_of_width(rng, common_fields(rng)),
        attention_bias=coin(rng),
        clip_qkv=rng.choice([None, 0.3, 1.0]),
    )
    return hub_case(rng, cls, config, pretraining_tp=1)


def ministral3(rng: random.Random, cls: str = "Ministral3ForCausalLM") -> Case:
    """The temperature steps up within the text."""
    sizes = common_fields(rng)
    sizes["rope_parameters"] |= {"original_max_position_embeddings": rng.choice([8, 20])}
    sizes["rope_parameters"][BETA] = rng.choice([0.1, 0.9, 0.9, 0.0])
    config = transformers.Ministral3Config(**sizes, rms_norm_eps=eps(rng), sliding_window=rng.choice([None, 7, 19]))
    free = config.rope_parameters["rope_type"] in ("default", "linear") and not sizes["rope_parameters"][BETA]
    # A length that neither an extension nor a temperature reads comes back as the model's.
    return hub_case(rng, cls, config, may_differ=("rope_parameters",) if free else ())


def fill_as_it_holds(patch: pytest.MonkeyPatch) -> None:
    """The mask of XGLM in float64 has a number that a float32, which it is put into, cannot hold."""
    full, least = torch.full, torch.finfo(torch.float32).min

    def fill(size: Any, value: Any, **more: Any) -> torch.Tensor:
        too_low = isinstance(value, float) and -math.inf < value < least
        return full(size, value, **({"dtype": torch.float64} if too_low else {}) | more)

    patch.setattr(torch, "full", fill)


def xglm(rng: random.Random, cls: str = "XGLMForCausalLM") -> Case:
    config = transformers.XGLMConfig(
        **gpt.sizes(rng, "vocab_size", "d_model", "num_layers", "attention_heads"),
        ffn_dim=rng.choice([40, 72]),
        max_position_embeddings=rng.choice([20, TRAINED]),
        activation_function=rng.choice(["gelu", "relu"]),
        scale_embedding=coin(rng),
        dropout=0.2,
        attention_dropout=0.3,
        activation_dropout=0.1,
        tie_word_embeddings=coin(rng),
    )
    return Case(getattr(transformers, cls), config, attention="eager", patch=fill_as_it_holds)


def biogpt(rng: random.Random, cls: str = "BioGptForCausalLM") -> Case:
    config = transformers.BioGptConfig(
        **gpt.sizes(rng, *gpt.USUAL),
        intermediate_size=rng.choice([40, 72]),
        max_position_embeddings=gpt.ROOM,
        hidden_act=rng.choice(["gelu", "relu"]),
        scale_embedding=coin(rng),
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.3,
        activation_dropout=0.1,
        tie_word_embeddings=coin(rng),
    )
    return Case(getattr(transformers, cls), config)


WITH_HEAD = {
    "olmo3": olmo3,
    "exaone4": exaone4,
    "cohere2": cohere2,
    "hunyuan_v1_dense": hunyuan,
    "hunyuan_v1_moe": hunyuan_moe,
    "seed_oss": seed_oss,
    "arcee": arcee,
    "apertus": apertus,
    "nemotron": nemotron,
    "persimmon": persimmon,
    "helium": helium,
    "olmo": olmo,
    "ministral3": ministral3,
    "xglm": xglm,
    "biogpt": biogpt,
}
WITHOUT_HEAD = {
    "olmo3": "Olmo3Model",
    "exaone4": "Exaone4Model",
    "cohere2": "Cohere2Model",
    "hunyuan_v1_dense": "HunYuanDenseV1Model",
    "hunyuan_v1_moe": "HunYuanMoEV1Model",
    "seed_oss": "SeedOssModel",
    "arcee": "ArceeModel",
    "apertus": "ApertusModel",
    "nemotron": "NemotronModel",
    "persimmon": "PersimmonModel",
    "helium": "HeliumModel",
    "olmo": "OlmoModel",
    "ministral3": "Ministral3Model",
    "xglm": "XGLMModel",
    "biogpt": "BioGptModel",
}

CASES: Cases = {
    **WITH_HEAD,
    **{f"{name}/without head": lambda rng, n=name: WITH_HEAD[n](rng, WITHOUT_HEAD[n]) for name in WITHOUT_HEAD},
    "olmo3/of old": olmo3_of_old,
    "exaone4/without windows": exaone4_without_windows,
}
