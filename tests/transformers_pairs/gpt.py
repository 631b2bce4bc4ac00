"""GPT-2 and the decoders of its time: BLOOM, MPT, GPT-NeoX, GPT-J, OPT."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from phasor import ModelConfig, preset

from .weights import (
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    LAYERS,
    OURS,
    ROWS,
    SIZES,
    TOKENS,
    VOCAB,
    Case,
    Theirs,
    both,
    fuse,
    qkv,
    same_names,
)


def gpt_2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=40,
        n_inner=HIDDEN,
        layer_norm_epsilon=EPS,
    )

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "transformer.wte") | both(theirs, "decoder.norm", "transformer.ln_f")
        found |= both(theirs, "decoder.positions.0", "transformer.wpe")
        for i in range(LAYERS):
            ours, layer = f"decoder.blocks.{i}", f"transformer.h.{i}"
            for n in (0, 1):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.ln_{n + 1}")
            names = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
            for mine, name in (names | {"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}).items():
                weight, bias = theirs(f"{layer}.{name}.weight").T, theirs(f"{layer}.{name}.bias")  # stored [in, out]
                if mine == "attention.qkv":
                    weight, bias = qkv(*weight.chunk(3), HEADS), qkv(*bias.chunk(3), HEADS)
                found |= {f"{ours}.{mine}.weight": weight, f"{ours}.{mine}.bias": bias}
        return found

    ours = preset("gpt-2", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    return Case(transformers.GPT2LMHeadModel(config), ours, rules)


def bloom(heads: int) -> Case:
    config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=DIM, n_layer=LAYERS, n_head=heads, layer_norm_epsilon=EPS
    )
    names = {
        "tokens": "word_embeddings",
        "decoder.embedding_norm": "word_embeddings_layernorm",
        "decoder.norm": "ln_f",
        "decoder.blocks.{}.residual.norms.0": "h.{}.input_layernorm",
        "decoder.blocks.{}.residual.norms.1": "h.{}.post_attention_layernorm",
        "decoder.blocks.{}.attention.qkv": "h.{}.self_attention.query_key_value",
        "decoder.blocks.{}.attention.out": "h.{}.self_attention.dense",
        "decoder.blocks.{}.feedforward.up": "h.{}.mlp.dense_h_to_4h",
        "decoder.blocks.{}.feedforward.down": "h.{}.mlp.dense_4h_to_h",
    }
    sizes = OURS | {"num_heads": heads, "hidden_dim": 4 * DIM}
    ours = preset("bloom", **sizes, norm={"kind": "layernorm", "eps": EPS})
    return Case(transformers.BloomForCausalLM(config), ours, same_names("transformer.", names))


def bloom_four_heads() -> Case:
    return bloom(4)


def bloom_six_heads_left_padding() -> Case:
    case = bloom(6)
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[0, :5] = False
    case.inputs, case.arguments = {"attention_mask": attention_mask.long()}, {"attention_mask": attention_mask}
    return case


def mpt() -> Case:
    """ALiBi, no biases, and queries, keys and values clipped."""
    config = transformers.MptConfig(
        vocab_size=VOCAB, d_model=DIM, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64, layer_norm_epsilon=1e-5
    )
    config.attn_config.clip_qkv = 0.7
    names = {
        "tokens": "wte",
        "decoder.norm": "norm_f",
        "decoder.blocks.{}.residual.norms.0": "blocks.{}.norm_1",
        "decoder.blocks.{}.residual.norms.1": "blocks.{}.norm_2",
        "decoder.blocks.{}.attention.out": "blocks.{}.attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "blocks.{}.ffn.up_proj",
        "decoder.blocks.{}.feedforward.down": "blocks.{}.ffn.down_proj",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("transformer.", names)(theirs, config)
        for i in range(LAYERS):
            parts = theirs(f"transformer.blocks.{i}.attn.Wqkv.weight").chunk(3)
            found[f"decoder.blocks.{i}.attention.qkv.weight"] = qkv(*parts, HEADS)
        return found

    ours = preset("mpt", **OURS | {"hidden_dim": 4 * DIM}, attention={"clip": 0.7})
    return Case(transformers.MptForCausalLM(config), ours, rules)


def gpt_neox() -> Case:
    """Parallel with a norm each, half of each head rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = transformers.GPTNeoXConfig(**SIZES, layer_norm_eps=EPS, rope_parameters=rope)
    names = {
        "tokens": "gpt_neox.embed_in",
        "decoder.norm": "gpt_neox.final_layer_norm",
        "decoder.blocks.{}.residual.norms.0": "gpt_neox.layers.{}.input_layernorm",
        "decoder.blocks.{}.residual.norms.1": "gpt_neox.layers.{}.post_attention_layernorm",
        "decoder.blocks.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "decoder.blocks.{}.attention.out": "gpt_neox.layers.{}.attention.dense",
        "decoder.blocks.{}.feedforward.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "decoder.blocks.{}.feedforward.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    }
    ours = ModelConfig(
        **OURS,
        position={"kind": "rotary", "rotary_dim": DIM // HEADS // 2},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "gelu", "bias": True},
        norm={"kind": "layernorm", "eps": EPS},
        placement={"kind": "parallel", "shared_norm": False},
        embedding={"tied": False},
    )
    return Case(transformers.GPTNeoXForCausalLM(config), ours, same_names("", names))


def gpt_j() -> Case:
    """Parallel after one norm, adjacent pairs of part of the head, a bias on the head's logits."""
    config = transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN, rotary_dim=8, layer_norm_epsilon=EPS
    )
    names = {
        "tokens": "transformer.wte",
        "decoder.norm": "transformer.ln_f",
        "decoder.blocks.{}.residual.norms.0": "transformer.h.{}.ln_1",
        "decoder.blocks.{}.attention.out": "transformer.h.{}.attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "transformer.h.{}.mlp.fc_in",
        "decoder.blocks.{}.feedforward.down": "transformer.h.{}.mlp.fc_out",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("", names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"transformer.h.{i}.attn.{p}_proj" for p in "qkv"]
            found |= fuse(theirs, f"decoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    ours = ModelConfig(
        **OURS,
        position={"kind": "rotary", "rotary_dim": 8, "pairing": "adjacent"},
        feedforward={"activation": "gelu-tanh", "bias": True},
        norm={"kind": "layernorm", "eps": EPS},
        placement="parallel",
        embedding={"tied": False},
        head={"kind": "lm", "bias": True},
    )
    return Case(transformers.GPTJForCausalLM(config), ours, rules)


def opt() -> Case:
    """The 350m kind: post-norm, a narrow token table with projections in and out, positions with an offset of 2."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        ffn_dim=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=40,
        word_embed_proj_dim=20,
        do_layer_norm_before=False,
    )
    names = {
        "tokens": "embed_tokens",
        "tokens.project": "project_in",
        "head.project": "project_out",
        "decoder.positions.0": "embed_positions",
        "decoder.blocks.{}.residual.norms.0": "layers.{}.self_attn_layer_norm",
        "decoder.blocks.{}.residual.norms.1": "layers.{}.final_layer_norm",
        "decoder.blocks.{}.attention.out": "layers.{}.self_attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "layers.{}.fc1",
        "decoder.blocks.{}.feedforward.down": "layers.{}.fc2",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("model.decoder.", names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"model.decoder.layers.{i}.self_attn.{p}_proj" for p in "qkv"]
            found |= fuse(theirs, f"decoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    ours = ModelConfig(
        **OURS,
        max_length=40,
        position={"kind": "learned", "offset": 2},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "relu", "bias": True},
        placement="post",
        embedding={"width": 20},
    )
    return Case(transformers.OPTForCausalLM(config), ours, rules)
