"""Random configurations of DeepSeek V2, V3, V3.2 and OCR, GLM-4.7-Flash and GLM-5."""

from __future__ import annotations

import random
from typing import Any

import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from .cases import EPS, GATES, Case, Cases, coin, llama_sizes, rope


def latent_sizes(rng: random.Random) -> dict[str, Any]:
    """Heads whose parts have widths of their own, with and without a latent vector for queries."""
    sizes = llama_sizes(rng)
    del sizes["head_dim"]
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    parameters = rope(rng)
    if parameters["rope_type"] == "yarn":
        parameters |= {"mscale": 0.7, "mscale_all_dim": rng.choice([0.7, 1.0])}
    return sizes | {
        "q_lora_rank": rng.choice([None, 10]),
        "kv_lora_rank": rng.choice([6, 14]),
        "qk_nope_head_dim": rng.choice([5, 8]),
        "qk_rope_head_dim": rng.choice([4, 6]),
        "v_head_dim": rng.choice([7, 8]),
        "attention_bias": coin(rng),
        "hidden_act": rng.choice(GATES),
        "rms_norm_eps": rng.choice(EPS),
        "tie_word_embeddings": coin(rng),
        "rope_parameters": parameters,
        "moe_intermediate_size": rng.choice([12, 20]),
        "n_shared_experts": rng.choice([1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "first_k_dense_replace": rng.choice([0, 1]),
        "num_experts_per_tok": rng.choice([1, 3]),
        "n_routed_experts": 8,
    }


def deepseek_v2(rng: random.Random) -> Case:
    sizes = latent_sizes(rng) | {"qk_nope_head_dim": 6}  # theirs takes no odd number in front of rotated features
    chosen = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2} if coin(rng) else {}
    config = DeepseekV2Config(**sizes | chosen)
    config._experts_implementation = "eager"
    return Case(DeepseekV2ForCausalLM, config)


def deepseek_ocr2(rng: random.Random) -> Case:
    sizes = latent_sizes(rng)
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layers = ["dense"] * sizes.pop("first_k_dense_replace") + ["sparse"] * sizes["num_hidden_layers"]
    sizes = {name: value for name, value in sizes.items() if name not in (*latent, "tie_word_embeddings")}
    sizes["num_key_value_heads"] = rng.choice([1, 2, sizes["num_attention_heads"]])
    sizes["mlp_layer_types"] = layers[: sizes["num_hidden_layers"]]
    chosen = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2} if coin(rng) else {}
    config = transformers.DeepseekOcr2TextConfig(**sizes | chosen)
    config._experts_implementation = "eager"
    return Case(transformers.DeepseekOcr2TextModel, config)


def with_correction(name: str, **fields: Any) -> Case:
    """A case whose experts have a correction, which checkpoints hold."""
    config = getattr(transformers, f"{name}Config")(**fields)
    config._experts_implementation = "eager"
    cls = getattr(transformers, f"{name}ForCausalLM")
    return Case(cls, config, buffers=lambda buffer: buffer.endswith("e_score_correction_bias"))


def groups(rng: random.Random) -> dict[str, Any]:
    chosen = rng.choice([{"n_group": 4, "topk_group": 2}, {"n_group": 1, "topk_group": 1}])
    return chosen | {"norm_topk_prob": coin(rng)}


def deepseek_v3(rng: random.Random) -> Case:
    return with_correction("DeepseekV3", **latent_sizes(rng) | groups(rng), rope_interleave=coin(rng))


def mixed_layers(rng: random.Random) -> dict[str, Any]:
    """Layers with experts and without, in any order."""
    sizes = latent_sizes(rng)
    del sizes["first_k_dense_replace"]
    kinds = ["sparse", *(rng.choice(["dense", "sparse"]) for _ in range(sizes["num_hidden_layers"] - 1))]
    return sizes | groups(rng) | {"mlp_layer_types": rng.sample(kinds, len(kinds))}


def glm4_moe_lite(rng: random.Random) -> Case:
    return with_correction("Glm4MoeLite", **mixed_layers(rng), rope_interleave=coin(rng))


def mistral4(rng: random.Random) -> Case:
    """Temperatures that step up several times; theirs has the rotated share of a head with extensions alone."""
    sizes = latent_sizes(rng) | groups(rng)
    parameters = rope(rng, ("linear", "llama3", "yarn"))
    if parameters["rope_type"] == "yarn":
        parameters |= {"mscale": 0.7, "mscale_all_dim": rng.choice([0.7, 1.0])}
    parameters |= {"llama_4_scaling_beta": rng.choice([0.1, 0.6])}
    sizes["rope_parameters"] = parameters | {"original_max_position_embeddings": rng.choice([9, 20])}
    config = transformers.Mistral4Config(**sizes, rope_interleave=coin(rng))
    config._experts_implementation = "eager"
    return Case(transformers.Mistral4ForCausalLM, config)


def indexed(rng: random.Random) -> dict[str, Any]:
    """More tokens than are chosen, by enough heads that no two scores are equal."""
    fields = mixed_layers(rng)
    width = fields["qk_rope_head_dim"] + rng.choice([0, 3])
    return fields | {"q_lora_rank": 10, "index_topk": 17, "index_head_dim": width, "index_n_heads": 24}


def deepseek_v32(rng: random.Random) -> Case:
    return with_correction("DeepseekV32", **indexed(rng))


def glm_moe_dsa(rng: random.Random) -> Case:
    """Layers with an indexer of their own, and some that take the choice of the one before."""
    fields = indexed(rng) | {"num_hidden_layers": 4}
    fields["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=4)
    fields["indexer_types"] = ["full", *rng.choices(["full", "shared"], k=3)]
    return with_correction("GlmMoeDsa", **fields)


CASES: Cases = {
    "deepseek_ocr2_text": deepseek_ocr2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "mistral4": mistral4,
}
