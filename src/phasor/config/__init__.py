"""Configurations: frozen, keyword-only, JSON both ways. Nothing here imports torch.

The configurations of position schemes and of kinds of attention are in `phasor.nn.positions` and
`phasor.nn.attention`, each beside its module; importing this package registers them all.
"""

from phasor.config.activations import (
    ActivationConfig,
    GEGLUConfig,
    GEGLUTanhConfig,
    GELUConfig,
    GELUTanhConfig,
    GLUConfig,
    ReGLUConfig,
    ReLUConfig,
    SiLUConfig,
    SwiGLUClampedConfig,
    SwiGLUConfig,
)
from phasor.config.attention import AttentionConfig
from phasor.config.discovery import discover
from phasor.config.model import LayerConfig, ModelConfig
from phasor.config.parts import (
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
from phasor.config.positions import Extension, PositionConfig
from phasor.config.sparse import ChunkedConfig, DilatedConfig, SparseConfig, StridedConfig, TopKConfig

__all__ = [
    "ActivationConfig",
    "AttentionConfig",
    "ChunkedConfig",
    "DeepNormConfig",
    "DilatedConfig",
    "DropoutConfig",
    "EmbeddingConfig",
    "ExpertsConfig",
    "Extension",
    "FanInInitConfig",
    "FeedForwardConfig",
    "GEGLUConfig",
    "GEGLUTanhConfig",
    "GELUConfig",
    "GELUTanhConfig",
    "GLUConfig",
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
    "ReGLUConfig",
    "ReLUConfig",
    "SandwichConfig",
    "SiLUConfig",
    "SparseConfig",
    "StridedConfig",
    "SwiGLUClampedConfig",
    "SwiGLUConfig",
    "T5InitConfig",
    "TopKConfig",
    "XavierInitConfig",
]

discover()
