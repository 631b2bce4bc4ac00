"""Presets of published architectures: each a small function that returns its configuration at the published size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phasor.config import (
    DropoutConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FanInInitConfig,
    FeedForwardConfig,
    GEGLUTanhConfig,
    GELUConfig,
    GELUTanhConfig,
    LanguageHeadConfig,
    LayerNormConfig,
    MaskedHeadConfig,
    ModelConfig,
    NoHeadConfig,
    NormalInitConfig,
    ParallelConfig,
    PostConfig,
    ReLUConfig,
    RMSNormConfig,
    SandwichConfig,
    SwiGLUConfig,
    T5InitConfig,
    XavierInitConfig,
)
from phasor.config.schema import names, unknown
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.nn.positions import (
    ALiBiConfig,
    LearnedConfig,
    Llama3Scaling,
    RotaryConfig,
    SinusoidalConfig,
    T5PositionConfig,
)

EVERY_BIAS = SoftmaxAttentionConfig(bias=("q", "k", "v", "out"))


def transformer_base() -> ModelConfig:
    """The Transformer of 2017, base: post-norm, sinusoidal, 63 M parameters."""
    return ModelConfig(
        shape="encoder-decoder",
        vocab_size=37000,
        dim=512,
        hidden_dim=2048,
        num_layers=6,
        num_heads=8,
        max_length=1024,
        position=SinusoidalConfig(),
        feedforward=FeedForwardConfig(activation=ReLUConfig(), bias=True),
        norm=LayerNormConfig(eps=1e-6),
        placement=PostConfig(),
        embedding=EmbeddingConfig(scale="sqrt"),
        dropout=DropoutConfig(embedding=0.1, residual=0.1),
        init=XavierInitConfig(),
    )


def transformer_big() -> ModelConfig:
    """The Transformer of 2017, big: twice as wide, 16 heads."""
    return transformer_base().replace(
        dim=1024, hidden_dim=4096, num_heads=16, dropout=DropoutConfig(embedding=0.3, residual=0.3)
    )


def bert() -> ModelConfig:
    """BERT base: an encoder with learned positions, token types and a pooler; gives hidden states."""
    return ModelConfig(
        shape="encoder",
        vocab_size=30522,
        dim=768,
        hidden_dim=3072,
        num_layers=12,
        num_heads=12,
        max_length=512,
        position=LearnedConfig(),
        attention=EVERY_BIAS,
        feedforward=FeedForwardConfig(activation=GELUConfig(), bias=True),
        norm=LayerNormConfig(eps=1e-12),
        placement=PostConfig(),
        embedding=EmbeddingConfig(norm=True, token_types=2),
        head=NoHeadConfig(pooler="first"),
        dropout=DropoutConfig(embedding=0.1, attention=0.1, residual=0.1),
    )


def roformer() -> ModelConfig:
    """RoFormer base: BERT with rotary positions, adjacent pairing, and a masked-language-model head."""
    return bert().replace(
        vocab_size=50000,
        max_length=1536,
        position=RotaryConfig(pairing="adjacent"),
        head=MaskedHeadConfig(),
    )


def gpt_2() -> ModelConfig:
    """GPT-2 small: a pre-norm decoder with learned positions, 124 M parameters."""
    return ModelConfig(
        vocab_size=50257,
        dim=768,
        hidden_dim=3072,
        num_layers=12,
        num_heads=12,
        max_length=1024,
        position=LearnedConfig(),
        attention=EVERY_BIAS,
        feedforward=FeedForwardConfig(activation=GELUTanhConfig(), bias=True),
        dropout=DropoutConfig(embedding=0.1, attention=0.1, residual=0.1),
        init=NormalInitConfig(by_depth=True),
    )


def t5() -> ModelConfig:
    """T5 base: relative bias on the scores, no division by sqrt(head_dim), RMS norm, tied."""
    return ModelConfig(
        shape="encoder-decoder",
        vocab_size=32128,
        dim=768,
        hidden_dim=3072,
        num_layers=12,
        num_heads=12,
        max_length=512,
        position=T5PositionConfig(),
        attention=SoftmaxAttentionConfig(scale=1.0),
        feedforward=FeedForwardConfig(activation=ReLUConfig()),
        norm=RMSNormConfig(eps=1e-6),
        head=LanguageHeadConfig(multiplier="rsqrt"),
        dropout=DropoutConfig(embedding=0.1, attention=0.1, residual=0.1, feedforward=0.1),
        init=T5InitConfig(),
    )


def t5_11() -> ModelConfig:
    """T5 v1.1 base: gated GELU, a head that is not tied, no dropout in pre-training."""
    return t5().replace(
        hidden_dim=2048,
        feedforward=FeedForwardConfig(activation=GEGLUTanhConfig()),
        embedding=EmbeddingConfig(tied=False),
        head=LanguageHeadConfig(),
        dropout=DropoutConfig(),
    )


def llama_2() -> ModelConfig:
    """Llama 2 7B: pre-norm decoder, RMS norm, SwiGLU, rotary."""
    return ModelConfig(
        vocab_size=32000,
        dim=4096,
        hidden_dim=11008,
        num_layers=32,
        num_heads=32,
        max_length=4096,
        position=RotaryConfig(),
        feedforward=FeedForwardConfig(activation=SwiGLUConfig()),
        norm=RMSNormConfig(eps=1e-5),
        embedding=EmbeddingConfig(tied=False),
    )


def llama_31() -> ModelConfig:
    """Llama 3.1 8B: grouped queries, rotary base 500,000 stretched to 131,072 tokens."""
    return llama_2().replace(
        vocab_size=128256,
        hidden_dim=14336,
        num_kv_heads=8,
        max_length=131072,
        position=RotaryConfig(base=500000.0, extension=Llama3Scaling(factor=8.0, original_length=8192)),
    )


def palm() -> ModelConfig:
    """PaLM 540B: parallel attention and feed-forward, multi-query, SwiGLU, no biases, shared embedding."""
    return ModelConfig(
        vocab_size=256000,
        dim=18432,
        hidden_dim=73728,
        num_layers=118,
        num_heads=48,
        num_kv_heads=1,
        head_dim=256,
        max_length=2048,
        position=RotaryConfig(),
        feedforward=FeedForwardConfig(activation=SwiGLUConfig()),
        norm=LayerNormConfig(bias=False),
        placement=ParallelConfig(),
        head=LanguageHeadConfig(multiplier="rsqrt"),
        init=FanInInitConfig(),
    )


def grok_1() -> ModelConfig:
    """Grok-1: 8 experts of which 2 are taken, sandwich RMS norm, attention soft-cap 30, rotary."""
    return ModelConfig(
        vocab_size=131072,
        dim=6144,
        hidden_dim=32768,
        num_layers=64,
        num_heads=48,
        num_kv_heads=8,
        max_length=8192,
        position=RotaryConfig(),
        attention=SoftmaxAttentionConfig(softcap=30.0),
        feedforward=FeedForwardConfig(
            activation=GEGLUTanhConfig(), experts=ExpertsConfig(num_experts=8, top_k=2, normalize=False)
        ),
        norm=RMSNormConfig(eps=1e-5),
        placement=SandwichConfig(),
        embedding=EmbeddingConfig(scale=78.38367176906169),
        head=LanguageHeadConfig(multiplier=0.5773502691896257),
    )


def deepnet() -> ModelConfig:
    """DeepNet: 100 + 100 layers held together by DeepNorm, 3.2 B parameters."""
    return transformer_big().replace(
        vocab_size=250000, num_layers=100, placement="deepnorm", dropout=DropoutConfig(embedding=0.1, residual=0.1)
    )


def bloom() -> ModelConfig:
    """BLOOM 176B: ALiBi, a norm after the embedding, biases everywhere."""
    return ModelConfig(
        vocab_size=250880,
        dim=14336,
        hidden_dim=57344,
        num_layers=70,
        num_heads=112,
        max_length=2048,
        position=ALiBiConfig(),
        attention=EVERY_BIAS,
        feedforward=FeedForwardConfig(activation=GELUTanhConfig(), bias=True),
        embedding=EmbeddingConfig(norm=True),
    )


def mpt() -> ModelConfig:
    """MPT 7B: ALiBi, no biases anywhere."""
    return ModelConfig(
        vocab_size=50432,
        dim=4096,
        hidden_dim=16384,
        num_layers=32,
        num_heads=32,
        max_length=2048,
        position=ALiBiConfig(),
        feedforward=FeedForwardConfig(activation=GELUConfig()),
        norm=LayerNormConfig(bias=False),
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "transformer-base": transformer_base,
    "transformer-big": transformer_big,
    "bert": bert,
    "roformer": roformer,
    "gpt-2": gpt_2,
    "t5": t5,
    "t5-1.1": t5_11,
    "llama-2": llama_2,
    "llama-3.1": llama_31,
    "palm": palm,
    "grok-1": grok_1,
    "deepnet": deepnet,
    "bloom": bloom,
    "mpt": mpt,
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a published architecture, at its published size or with some fields changed.

    Sizes left out follow those given: `hidden_dim` keeps its ratio to `dim`, `head_dim` becomes
    `dim / num_heads`, `num_kv_heads` keeps its share of `num_heads`, and a learned table follows `max_length`.

    >>> small = preset("llama-3.1", dim=256, num_heads=4, num_layers=2, vocab_size=1000)
    >>> small.hidden_dim, small.head_dim, small.num_kv_heads
    (896, 64, 1)
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    full = PRESETS[name]()
    for field in changes:
        if field not in names(ModelConfig):
            raise unknown("field of ModelConfig", field, names(ModelConfig))
    follow: dict[str, Any] = {}
    if isinstance(dim := changes.get("dim"), int):
        follow["hidden_dim"] = full.hidden_dim * dim // full.dim
        follow["head_dim"] = None
    if isinstance(heads := changes.get("num_heads"), int) and "num_kv_heads" not in full.left_out:
        share = max(1, full.num_kv_heads * heads // full.num_heads)
        follow["num_kv_heads"] = share if heads % share == 0 else 1
    return full.replace(**follow | changes)
