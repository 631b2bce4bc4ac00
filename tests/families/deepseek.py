"""Random configurations of DeepSeek V2 and V3."""

from __future__ import annotations

import random
from typing import Any

from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

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
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2} if coin(rng) else {}
    config = DeepseekV2Config(**latent_sizes(rng) | groups)
    config._experts_implementation = "eager"
    return Case(DeepseekV2ForCausalLM, config)


def deepseek_v3(rng: random.Random) -> Case:
    groups = rng.choice([{"n_group": 4, "topk_group": 2}, {"n_group": 1, "topk_group": 1}])
    options = {"norm_topk_prob": coin(rng), "rope_interleave": coin(rng)}
    config = DeepseekV3Config(**latent_sizes(rng) | groups | options)
    config._experts_implementation = "eager"
    return Case(DeepseekV3ForCausalLM, config, buffers=lambda name: name.endswith("e_score_correction_bias"))


CASES: Cases = {"deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3}
