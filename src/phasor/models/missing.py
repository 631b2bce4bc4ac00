"""Architectures that phasor does not load, though it has most of their parts: what each would need."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Missing(NamedTuple):
    """The part of an architecture that phasor does not have, and the family that is nearest."""

    part: str
    nearest: str


MAMBA = "Mamba layers (selective state spaces)"
CAPACITY = "experts with a capacity, beyond which tokens are dropped"
RECURRENT = "a recurrent unit in place of attention"
CODE = "fields and tensor names of code that is in its folders"
BOTH_SIDES = f"attention to later tokens too, and {CODE}"
DIFFUSION = "generation that fills in masked tokens in any order"
INKLING = "short convolutions over keys, values and what a layer adds, and shared experts that the router weighs"
ALTERNATING = "several residual streams that layers take turns to update (AltUp)"

MISSING = {
    "Dream": Missing(DIFFUSION, "qwen2"),
    "baichuan": Missing(CODE, "llama"),
    "bidirectional_pplx_qwen3": Missing(BOTH_SIDES, "qwen3"),
    "chatglm": Missing(CODE, "glm"),
    "deepseek_v4": Missing(
        "keys that sum up groups of tokens, several residual streams (hyper-connections), experts by token id, and "
        "an output projection of groups of heads",
        "deepseek_v32",
    ),
    "exaone": Missing(CODE, "llama"),
    "falcon_h1": Missing("layers of Mamba-2 and softmax attention side by side", "bamba"),
    "falcon_mamba": Missing(MAMBA, "llama"),
    "gemma3n": Missing(ALTERNATING, "gemma4_text"),
    "gemma3n_text": Missing(ALTERNATING, "gemma4_text"),
    "inkling_mm_model": Missing(INKLING, "glm4_moe"),
    "inkling_text": Missing(INKLING, "glm4_moe"),
    "internlm2": Missing(CODE, "llama"),
    "jamba": Missing(MAMBA, "mixtral"),
    "kimi_linear": Missing("linear attention layers with a decay per feature (Kimi delta attention)", "deepseek_v3"),
    "llada2_moe": Missing(DIFFUSION, "qwen3_moe"),
    "llama_bidirec": Missing(BOTH_SIDES, "eurobert"),
    "mamba": Missing(MAMBA, "llama"),
    "mamba2": Missing("fields and tensor names that no family here has, of layers of Mamba-2 alone", "nemotron_h"),
    "mimo": Missing(CODE, "qwen2"),
    "mimo_v2_flash": Missing("values of another width than queries and keys in softmax attention", "gpt_oss"),
    "nemotron-nas": Missing(f"layers with a linear map in place of attention, {CODE}", "llama"),
    "nllb-moe": Missing(CAPACITY, "m2m_100"),
    "ouro": Missing("layers that run over their own output several times", "llama"),
    "qwen": Missing(CODE, "qwen2"),
    "recurrent_gemma": Missing(f"{RECURRENT} (RG-LRU)", "gemma"),
    "rwkv": Missing(f"{RECURRENT} (WKV)", "gpt2"),
    "step3p5": Missing("other numbers of query heads in layers with windows than in the rest", "qwen3_moe"),
    "xlnet": Missing("relative positions with a separate learned query (Transformer-XL)", "bert"),
    "xlstm": Missing(f"{RECURRENT} (mLSTM)", "llama"),
    "zamba2": Missing("one block of attention that several layers share, each with an adapter", "bamba"),
}


def refuse_missing(kind: object, file: Path) -> None:
    """Raise ValueError for a `model_type` whose missing part is known.

    >>> refuse_missing("mamba", Path("config.json"))
    Traceback (most recent call last):
    ValueError: config.json: phasor does not load mamba: it has Mamba layers (selective state spaces); the nearest ...
    """
    if isinstance(kind, str) and kind in MISSING:
        part, nearest = MISSING[kind]
        raise ValueError(f"{file}: phasor does not load {kind}: it has {part}; the nearest family is {nearest}")
