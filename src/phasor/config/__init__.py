"""Configurations: frozen, keyword-only, JSON both ways. Nothing here imports torch.

The configurations of position schemes are in `phasor.nn.positions`, each beside its module; importing this package
registers them all.
"""

from phasor.config.model import LayerConfig, ModelConfig
from phasor.config.parts import (
    AttentionConfig,
    DeepNormConfig,
    DropoutConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FanInInitConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    LanguageHeadConfig,
    LayerNormConfig,
    LogitsConfig,
    MaskedHeadConfig,
    NoHeadConfig,
    NoNormConfig,
    NormalInitConfig,
    NormConfig,
    OutputConfig,
    ParallelConfig,
    PlacementConfig,
    PooledHeadConfig,
    PostConfig,
    PreConfig,
    RMSNormConfig,
    SandwichConfig,
    T5InitConfig,
    XavierInitConfig,
)
from phasor.config.positions import Extension, PositionConfig, discover

__all__ = [
    "AttentionConfig",
    "DeepNormConfig",
    "DropoutConfig",
    "EmbeddingConfig",
    "ExpertsConfig",
    "Extension",
    "FanInInitConfig",
    "FeedForwardConfig",
    "HeadConfig",
    "InitConfig",
    "LanguageHeadConfig",
    "LayerConfig",
    "LayerNormConfig",
    "LogitsConfig",
    "MaskedHeadConfig",
    "ModelConfig",
    "NoHeadConfig",
    "NoNormConfig",
    "NormConfig",
    "NormalInitConfig",
    "OutputConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PooledHeadConfig",
    "PositionConfig",
    "PostConfig",
    "PreConfig",
    "RMSNormConfig",
    "SandwichConfig",
    "T5InitConfig",
    "XavierInitConfig",
]

discover()
