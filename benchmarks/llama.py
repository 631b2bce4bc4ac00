"""A Llama-shaped model of ours and of transformers, with the same weights: what the CPU benchmarks compare."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phasor

SHAPE = {"dim": 512, "hidden_dim": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 32000}


def pair(**changes: Any) -> tuple[phasor.Transformer, LlamaForCausalLM]:
    """Our model and theirs, with the same weights; `changes` are further fields of our configuration."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=SHAPE["dim"],
            intermediate_size=SHAPE["hidden_dim"],
            num_hidden_layers=SHAPE["num_layers"],
            num_attention_heads=SHAPE["num_heads"],
            num_key_value_heads=SHAPE["num_kv_heads"],
            vocab_size=SHAPE["vocab_size"],
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
    )
    ours = phasor.Transformer(phasor.preset("llama-2", **SHAPE, **changes))
    state = theirs.state_dict()
    groups, width = SHAPE["num_kv_heads"], SHAPE["dim"] // SHAPE["num_heads"]
    mine = {"tokens.weight": state["model.embed_tokens.weight"], "head.weight": state["lm_head.weight"]}
    mine["decoder.norm.weight"] = state["model.norm.weight"]
    for i in range(SHAPE["num_layers"]):
        at, to = f"model.layers.{i}.", f"decoder.blocks.{i}."
        q, k, v = (state[f"{at}self_attn.{p}_proj.weight"].unflatten(0, (groups, -1, width)) for p in "qkv")
        mine[to + "attention.qkv.weight"] = torch.cat((q, k, v), dim=1).flatten(0, 2)
        mine[to + "attention.out.weight"] = state[at + "self_attn.o_proj.weight"]
        mine[to + "feedforward.up.weight"] = torch.cat([state[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")])
        mine[to + "feedforward.down.weight"] = state[at + "mlp.down_proj.weight"]
        mine[to + "residual.norms.0.weight"] = state[at + "input_layernorm.weight"]
        mine[to + "residual.norms.1.weight"] = state[at + "post_attention_layernorm.weight"]
    ours.load_state_dict(mine)
    return ours, theirs
