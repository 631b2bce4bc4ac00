"""The engine gives the tokens of transformers' greedy decoding for ten families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import phasor
from phasor import Engine
from phasor.bench import FAMILIES
from phasor.bench.families import family_pair
from phasor.bench.peers import quiet, transformers_tokens
from phasor.bench.sizes import TINY

PROMPTS = [[5, 6, 7], [9], [8, 7, 6, 5, 4, 3, 21, 22, 23, 30, 31], [40, 41, 42, 43]]
GENERATING = [name for name in FAMILIES if name != "modernbert"]  # which is an encoder
SIZES = {"max_rows": 3, "page_size": 4, "pages": 32, "prefill_chunk": 4}
COUNT = 12


def check(ours: phasor.Transformer, theirs: Any) -> None:
    theirs.generation_config.suppress_tokens = None
    expected = [transformers_tokens(theirs, [prompt], COUNT)[0] for prompt in PROMPTS]
    ours.generation_settings = {}
    with Engine(ours, **SIZES) as engine:
        handles = [engine.submit(prompt, max_new_tokens=COUNT, stop=(), bad_words_ids=()) for prompt in PROMPTS]
        assert [handle.result().tokens for handle in handles] == expected


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", GENERATING)
def test_tokens_of_a_family(family: str) -> None:
    check(*family_pair(family, TINY.families, torch.device("cpu"), torch.float32))


def test_tokens_of_layers_with_a_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3NextConfig(
        **sizes, **heads, **linear, **experts, linear_value_head_dim=8, shared_expert_intermediate_size=24
    )
    theirs = transformers.Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight *= 8
    with quiet():
        theirs.save_pretrained(tmp_path)
        ours = phasor.load(tmp_path)
    check(ours, theirs)
