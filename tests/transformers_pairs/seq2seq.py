"""Encoder-decoders: T5 and Marian."""

from __future__ import annotations

from typing import Any

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
    VOCAB,
    Case,
    Theirs,
    both,
    concatenate,
    fuse,
    kv,
    qkv,
    right_padding,
)


def t5_rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
    found = both(theirs, "tokens", "shared")
    if not config.embedding.tied:
        found |= both(theirs, "head", "lm_head")
    for side in ("encoder", "decoder"):
        found |= both(theirs, f"{side}.norm", f"{side}.final_layer_norm")
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        found |= both(theirs, f"{side}.positions.0", table)
        for i in range(config.depth(side)):
            ours, layer = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            names = [f"{layer}.0.SelfAttention.{p}" for p in "qkv"]
            found |= fuse(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, HEADS))
            found |= both(theirs, f"{ours}.attention.out", f"{layer}.0.SelfAttention.o")
            last = 2 if side == "decoder" else 1
            for n in range(last + 1):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{n}.layer_norm")
            if side == "decoder":
                cross = f"{layer}.1.EncDecAttention"
                found |= both(theirs, f"{ours}.cross.q", f"{cross}.q")
                found |= fuse(theirs, f"{ours}.cross.kv", [f"{cross}.k", f"{cross}.v"], lambda *x: kv(*x, HEADS))
                found |= both(theirs, f"{ours}.cross.out", f"{cross}.o")
            dense = f"{layer}.{last}.DenseReluDense"
            names = [f"{dense}.wi_0", f"{dense}.wi_1"] if config.feedforward.gated else [f"{dense}.wi"]
            found |= fuse(theirs, f"{ours}.feedforward.up", names, concatenate)
            found |= both(theirs, f"{ours}.feedforward.down", f"{dense}.wo")
    return found


def t5(name: str, **fields: Any) -> Case:
    """Heads wider than their share, more layers in the encoder, and few buckets so that all of them are met."""
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=14,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_decoder_layers=2,
        num_heads=HEADS,
        layer_norm_epsilon=EPS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=18,
        **fields,
    )
    ours = preset(
        name,
        **OURS | {"num_layers": 2, "num_encoder_layers": LAYERS, "head_dim": 14},
        position={"kind": "t5", "num_buckets": 8, "max_distance": 18},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    inputs = {"attention_mask": right_padding().long()}
    return Case(
        transformers.T5ForConditionalGeneration(config), ours, t5_rules, inputs, {"attention_mask": right_padding()}
    )


def t5_10() -> Case:
    return t5("t5", feed_forward_proj="relu")


def t5_11() -> Case:
    case = t5("t5-1.1", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    case.theirs.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, DIM))  # an untied head
    return case


def marian() -> Case:
    """An encoder-decoder of 2017 with sines and cosines in halves."""
    config = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        max_position_embeddings=40,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=0,
    )

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "model.shared")
        found["head.bias"] = theirs("final_logits_bias")[0]
        for side in ("encoder", "decoder"):
            for i in range(LAYERS):
                ours, layer = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
                names = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
                found |= fuse(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, HEADS))
                found |= both(theirs, f"{ours}.attention.out", f"{layer}.self_attn.out_proj")
                norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
                for n, norm in enumerate(norms if side == "decoder" else norms[::2]):
                    found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{norm}")
                if side == "decoder":
                    cross = [f"{layer}.encoder_attn.{p}_proj" for p in "qkv"]
                    found |= both(theirs, f"{ours}.cross.q", cross[0])
                    found |= fuse(theirs, f"{ours}.cross.kv", cross[1:], lambda *x: kv(*x, HEADS))
                    found |= both(theirs, f"{ours}.cross.out", f"{layer}.encoder_attn.out_proj")
                found |= both(theirs, f"{ours}.feedforward.up", f"{layer}.fc1")
                found |= both(theirs, f"{ours}.feedforward.down", f"{layer}.fc2")
        return found

    ours = preset(
        "transformer-base",
        **OURS,
        position={"kind": "sinusoidal", "layout": "halves"},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "silu", "bias": True},
        norm={"kind": "layernorm"},
        head={"kind": "lm", "bias": True},
    )
    inputs = {"attention_mask": right_padding().long()}
    case = Case(transformers.MarianMTModel(config), ours, rules, inputs, {"attention_mask": right_padding()})
    case.theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    return case
