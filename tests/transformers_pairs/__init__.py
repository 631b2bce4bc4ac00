"""Tiny models of transformers and ours with the same weights; each case writes out which weight is which.

Norms use a large epsilon, so that a wrong one would show.
"""

from __future__ import annotations

from .encoders import bert, roformer
from .gpt import bloom_four_heads, bloom_six_heads_left_padding, gpt_2, gpt_j, gpt_neox, mpt, opt
from .llama_like import (
    cohere,
    gemma_2,
    gpt_oss,
    granite,
    llama_3,
    llama_left_padding,
    llama_plain,
    llama_yarn,
    mixtral,
    olmo_2,
    qwen2_moe,
    qwen3_moe,
)
from .seq2seq import marian, t5_10, t5_11
from .weights import ROWS, TOKENS, VOCAB, Case, make

__all__ = ["CASES", "ROWS", "TOKENS", "VOCAB", "Case", "make"]

CASES = {
    build.__name__: build
    for build in (
        llama_plain,
        llama_3,
        llama_yarn,
        llama_left_padding,
        mixtral,
        qwen3_moe,
        qwen2_moe,
        gpt_oss,
        gemma_2,
        olmo_2,
        cohere,
        granite,
        gpt_2,
        bloom_four_heads,
        bloom_six_heads_left_padding,
        mpt,
        gpt_neox,
        gpt_j,
        opt,
        bert,
        roformer,
        t5_10,
        t5_11,
        marian,
    )
}
