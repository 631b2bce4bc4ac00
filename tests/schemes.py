"""A tiny model for every position scheme and every extension: what tests over all of them run on."""

from __future__ import annotations

import torch

import phasor
from phasor import ModelConfig, Transformer

VOCAB = 61
HEAD_DIM = 8
SHORT = 8  # the length after which extensions that depend on length begin to act

EXTENSIONS = {
    "linear": phasor.LinearScaling(factor=4.0),
    "ntk": phasor.NTKScaling(factor=4.0),
    "dynamic-ntk": phasor.DynamicNTKScaling(factor=4.0, original_length=SHORT),
    "yarn": phasor.YaRN(factor=4.0, original_length=64),
    "dynamic-yarn": phasor.DynamicYaRN(original_length=SHORT),
    "llama3": phasor.Llama3Scaling(factor=8.0, original_length=64),
    "longrope": phasor.LongRoPE(
        short_factor=(1.0, 1.1, 1.3, 1.5), long_factor=(1.0, 2.0, 3.5, 6.0), original_length=SHORT, factor=4.0
    ),
    "proportional": phasor.ProportionalScaling(fraction=0.5, factor=2.0),
}
SCHEMES = {
    "none": phasor.NoPositionConfig(),
    "sinusoidal": phasor.SinusoidalConfig(),
    "sinusoidal-halves": phasor.SinusoidalConfig(layout="halves", spacing="ends", offset=2, zero_padding=True),
    "sinusoidal-concat": phasor.SinusoidalConfig(combine="concat", width=7),
    "learned": phasor.LearnedConfig(),
    "learned-offset": phasor.LearnedConfig(offset=2),
    "counting": phasor.CountingConfig(),
    "normalized": phasor.NormalizedConfig(),
    "t5": phasor.T5PositionConfig(num_buckets=8, max_distance=16),
    "alibi": phasor.ALiBiConfig(),
    "rotary": phasor.RotaryConfig(),
    "rotary-adjacent": phasor.RotaryConfig(pairing="adjacent"),
    "rotary-partial": phasor.RotaryConfig(width=4),
    "rotary-one-pair": phasor.RotaryConfig(width=2),
    "rotary-values": phasor.RotaryConfig(pairing="adjacent", values=True),
    "xpos": phasor.XPosConfig(),
    "axial": phasor.AxialConfig(),
    "mrope": phasor.MultiSectionConfig(sections=(1, 1, 2)),
} | {f"rotary-{name}": phasor.RotaryConfig(extension=extension) for name, extension in EXTENSIONS.items()}

SHIFT_INVARIANT = [name for name, scheme in SCHEMES.items() if scheme.shift_invariant]
FIXED = [name for name, scheme in SCHEMES.items() if not scheme.depends_on_length]
BY_LENGTH = [name for name, scheme in SCHEMES.items() if scheme.depends_on_length]

# What attention may look at, beside everything and everything before.
VIEWS = {
    "whole": phasor.AttentionConfig(),
    "window": phasor.AttentionConfig(window=4),
    "sinks": phasor.AttentionConfig(window=4, sink_tokens=2),
}


def tiny(scheme: str | phasor.config.PositionConfig, **changes: object) -> ModelConfig:
    """Two narrow layers with grouped queries; unit-variance activations, so that positions matter to the logits."""
    position = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    sizes = {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    parts = {"position": position, "norm": "rmsnorm", "feedforward": {"activation": "swiglu"}, "init": "fan-in"}
    return ModelConfig(**{**sizes, "head_dim": HEAD_DIM, "max_length": 128, **parts, **changes})


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """The model with reproducible weights, biases and sink logits drawn too where they would start at zero."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "sinks" in name:
                weight.normal_(std=0.5)
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def relative_change(after: torch.Tensor, before: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    after, before = after.detach(), before.detach()
    return float((after - before).abs().max() / before.abs().max())
