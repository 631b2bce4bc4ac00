"""A tiny model for every position scheme and every extension: what tests over all of them run on."""

from __future__ import annotations

import torch
from device import DEVICE

import phasor
from phasor import ModelConfig, Transformer
from phasor.config import Extension, PositionConfig

VOCAB = 61
HEAD_DIM = 8
SHORT = 8  # the length after which the extensions in `example` that depend on length begin to act

# Every scheme and every extension states its own examples; a new one is tested without being listed here.
EXTENSIONS = {kind: extension.example() for kind, extension in Extension.kinds.items()}
SCHEMES = {name: scheme for cls in PositionConfig.kinds.values() for name, scheme in cls.examples().items()}

FIXED = [name for name, scheme in SCHEMES.items() if not scheme.depends_on_length]
BY_LENGTH = [name for name, scheme in SCHEMES.items() if scheme.depends_on_length]

# What attention may look at, beside everything and everything before.
VIEWS = {
    "whole": phasor.SoftmaxAttentionConfig(),
    "window": phasor.SoftmaxAttentionConfig(window=4),
    "sinks": phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2),
}


def tiny(scheme: str | PositionConfig, **changes: object) -> ModelConfig:
    """Two narrow layers with grouped queries; unit-variance activations, so that positions matter to the logits."""
    position = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    sizes = {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    parts = {"position": position, "norm": "rmsnorm", "feedforward": {"activation": "swiglu"}, "init": "fan-in"}
    return ModelConfig(**{**sizes, "head_dim": HEAD_DIM, "max_length": 128, **parts, **changes})


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """The model with the same weights on every device, biases and sink logits drawn too where they would be zero."""
    torch.manual_seed(seed)
    with torch.device("cpu"), torch.no_grad():
        model = Transformer(config).eval()
        for name, weight in model.named_parameters():
            if "bias" in name or "sinks" in name:
                weight.normal_(std=0.5)
    return model.to(DEVICE)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def relative_change(after: torch.Tensor, before: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    after, before = after.detach(), before.detach()
    return float((after - before).abs().max() / before.abs().max())
