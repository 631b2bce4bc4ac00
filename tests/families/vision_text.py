"""Random configurations of the text parts of vision-language models, those that are separate families."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import Case, Cases, coin
from .llama_like import common_fields, eps, hub_case, layer_rules, windows

TIED = "tie_word_embeddings"  # their text parts have no head, and no field for it


def sections(rng: random.Random, pairs: int) -> list[int]:
    """Numbers of pairs for time, height and width, each at least 1."""
    height = rng.randint(1, pairs - 2)
    width = rng.randint(1, pairs - 1 - height)
    return [pairs - height - width, height, width]


def interleaved_sections(rng: random.Random, pairs: int) -> list[int]:
    """The same, where height and width have no more than every third pair."""
    height, width = rng.randint(1, (pairs + 1) // 3), rng.randint(1, pairs // 3)
    return [pairs - height - width, height, width]


def plain_heads(rng: random.Random) -> dict[str, Any]:
    """Common fields for classes whose heads are the width's share: an even number of features, at least 8."""
    fields = common_fields(rng)
    del fields["head_dim"], fields[TIED]
    return fields


def head_dim(fields: dict[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def qwen2_vl(rng: random.Random, name: str = "Qwen2VL") -> Case:
    fields = plain_heads(rng)
    fields["rope_parameters"]["mrope_section"] = sections(rng, head_dim(fields) // 2)
    in_layers = windows(rng, fields["num_hidden_layers"])
    config = getattr(transformers, f"{name}TextConfig")(**fields, **in_layers, rms_norm_eps=eps(rng))
    # Theirs forgets the width of windows that are not in use.
    return hub_case(rng, f"{name}TextModel", config, may_differ=(TIED, "sliding_window"), **layer_rules(in_layers))


def qwen3_vl(rng: random.Random) -> Case:
    fields = common_fields(rng)
    del fields[TIED]
    fields["rope_parameters"] |= {"mrope_section": interleaved_sections(rng, head_dim(fields) // 2)}
    fields["rope_parameters"] |= {"mrope_interleaved": True}
    config = transformers.Qwen3VLTextConfig(**fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return hub_case(rng, "Qwen3VLTextModel", config, may_differ=(TIED,))


def qwen3_vl_moe(rng: random.Random) -> Case:
    fields = common_fields(rng)
    del fields[TIED]
    fields["rope_parameters"] |= {"mrope_section": interleaved_sections(rng, head_dim(fields) // 2)}
    fields["rope_parameters"] |= {"mrope_interleaved": True}
    config = transformers.Qwen3VLMoeTextConfig(
        **fields,
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        num_experts=rng.choice([4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        moe_intermediate_size=rng.choice([16, 24]),
        mlp_only_layers=rng.choice([[], [0]]),
        decoder_sparse_step=rng.choice([1, 2]),
    )
    layers = ("decoder_sparse_step", "mlp_only_layers")  # which may be said in two ways
    return hub_case(rng, "Qwen3VLMoeTextModel", config, may_differ=(TIED, *layers), norm_topk_prob=True)


def glm4v(rng: random.Random) -> Case:
    fields = plain_heads(rng)
    width = rng.choice([6, 8]) if head_dim(fields) == 8 else rng.choice([8, 10, 12])
    fields["rope_parameters"]["partial_rotary_factor"] = width / head_dim(fields)
    fields["rope_parameters"]["mrope_section"] = sections(rng, int(head_dim(fields) * (width / head_dim(fields))) // 2)
    config = transformers.Glm4vTextConfig(**fields, rms_norm_eps=eps(rng))
    return hub_case(rng, "Glm4vTextModel", config, may_differ=(TIED,))


CASES: Cases = {
    "qwen2_vl_text": qwen2_vl,
    "qwen2_5_vl_text": lambda rng: qwen2_vl(rng, "Qwen2_5_VL"),
    "qwen3_vl_text": qwen3_vl,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "glm4v_text": glm4v,
}
