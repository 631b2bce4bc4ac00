"""Random configurations of models that read speech: Whisper, Moonshine."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from .cases import Case, Cases
from .seq2seq import bart_sizes

REACH = 70  # more positions than anything here needs


def whisper(rng: random.Random, cls: str = "WhisperForConditionalGeneration") -> Case:
    """Frames as many as its table of positions asks for, which is no parameter to be trained."""
    bins, source = rng.choice([5, 11]), rng.choice([13, 26])
    sizes = bart_sizes(rng, begin_suppress_tokens=None)
    sizes["d_model"] = sizes["encoder_attention_heads"] * rng.choice([8, 10])
    del sizes["max_position_embeddings"]
    config = transformers.WhisperConfig(
        **sizes, num_mel_bins=bins, max_source_positions=source, max_target_positions=REACH
    )

    def draw_table(model: Any) -> None:
        body = getattr(model, "model", model)
        body.encoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(3))

    return Case(
        getattr(transformers, cls),
        config,
        features=lambda rows, generator: torch.randn(rows, 2 * source, bins, generator=generator),
        inputs=lambda features: {"input_features": features.mT},
        buffers=lambda name: name.endswith("encoder.embed_positions.weight"),
        touch=draw_table,
    )


def moonshine(rng: random.Random, cls: str = "MoonshineForConditionalGeneration") -> Case:
    """Samples of a number that leaves a rest in every convolution; some of a head's features are rotated."""
    heads, width = rng.choice([2, 3]), rng.choice([8, 12])
    samples = rng.choice([3000, 4001])
    config = transformers.MoonshineConfig(
        vocab_size=rng.randint(60, 80),
        hidden_size=heads * width,
        intermediate_size=rng.choice([30, 44]),
        encoder_num_hidden_layers=rng.choice([2, 3]),
        decoder_num_hidden_layers=rng.choice([2, 3]),
        encoder_num_attention_heads=heads,
        decoder_num_attention_heads=heads,
        pad_head_dim_to_multiple_of=rng.choice([None, 16]),
        encoder_hidden_act=rng.choice(["gelu", "relu", "silu"]),
        decoder_hidden_act=rng.choice(["silu", "gelu"]),
        max_position_embeddings=rng.choice([50, 194]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rng.choice([500.0, 10000.0]),
            "partial_rotary_factor": rng.choice([0.5, 1.0]),
        },
        attention_bias=rng.random() < 0.5,
        attention_dropout=rng.choice([0.0, 0.2]),
        tie_word_embeddings=rng.random() < 0.5,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Case(
        getattr(transformers, cls),
        config,
        features=lambda rows, generator: torch.randn(rows, samples, 1, generator=generator),
        inputs=lambda samples: {"input_values": samples[..., 0]},
    )


CASES: Cases = {
    "whisper": whisper,
    "whisper/without head": lambda rng: whisper(rng, "WhisperModel"),
    "moonshine": moonshine,
    "moonshine/without head": lambda rng: moonshine(rng, "MoonshineModel"),
}
