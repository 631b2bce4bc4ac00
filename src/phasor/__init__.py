"""phasor: one Transformer, every part a choice, positions exact at any length.

The names below are loaded when they are first used, so that importing phasor loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phasor.distribution import __version__ as __version__

_HOMES = {
    "phasor.config": (
        "ChunkedConfig ConvolutionConfig DeepNormConfig DenseConfig DilatedConfig DropoutConfig EmbeddingConfig "
        "EncoderConfig ExpertsConfig FanInInitConfig FeedForwardConfig FrontEndConfig GEGLUConfig GEGLUTanhConfig "
        "GELUConfig GELUTanhConfig GLUConfig LanguageHeadConfig LayerConfig LayerNormConfig MaskedHeadConfig "
        "ModelConfig NoHeadConfig NoNormConfig NormalInitConfig OutputConfig ParallelConfig PooledHeadConfig "
        "PostConfig PreConfig RMSNormConfig ReGLUConfig ReLUConfig ReLUSquaredConfig SandwichConfig "
        "SequenceClassifierConfig SiLUConfig StridedConfig SwiGLUClampedConfig SwiGLUConfig T5InitConfig "
        "TokenClassifierConfig TopKConfig XIELUConfig XavierInitConfig"
    ),
    "phasor.inspect.kinds": "kinds",
    "phasor.models.presets": "preset",
    "phasor.inspect.explain": "explain",
    "phasor.evaluation": "evaluate translate",
    "phasor.inspect.backends": "backends",
    "phasor.kv_cache.dynamic": "KVCache",
    "phasor.artifacts": "verify",
    "phasor.checkpoints": "convert exact_rotary load merge save",
    "phasor.adapters": "add_adapter disable_adapters set_adapters",
    "phasor.config.generation": "GenerationConfig SpecialTokens",
    "phasor.config.mixture": "MixtureSource",
    "phasor.config.recipe": "DataConfig MeshConfig OptimizerConfig Recipe SaveConfig TrainConfig",
    "phasor.config.classify": "ClassifyConfig",
    "phasor.config.distill": "DistillConfig",
    "phasor.config.embed": "EmbedConfig",
    "phasor.config.lora": "LoRAConfig",
    "phasor.config.preference": "PreferenceConfig",
    "phasor.config.schedules": "ConstantSchedule CosineSchedule InverseSqrtSchedule LinearSchedule StableSchedule",
    "phasor.generation": "ChatSession Generated chat generate stream",
    "phasor.generation.engine": "Engine",
    "phasor.nn.record": "Record",
    "phasor.transformer": "Transformer",
    "phasor.nn.positions.rotary.module": "Rotary",
    "phasor.nn.moe": "balancing_loss",
    "phasor.quantization": "quantize",
    "phasor.training": "train",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if TYPE_CHECKING:
    from phasor.adapters import add_adapter as add_adapter
    from phasor.adapters import disable_adapters as disable_adapters
    from phasor.adapters import set_adapters as set_adapters
    from phasor.artifacts import verify as verify
    from phasor.checkpoints import convert as convert
    from phasor.checkpoints import exact_rotary as exact_rotary
    from phasor.checkpoints import load as load
    from phasor.checkpoints import merge as merge
    from phasor.checkpoints import save as save
    from phasor.config import *  # noqa: F403
    from phasor.config.classify import ClassifyConfig as ClassifyConfig
    from phasor.config.distill import DistillConfig as DistillConfig
    from phasor.config.embed import EmbedConfig as EmbedConfig
    from phasor.config.generation import GenerationConfig as GenerationConfig
    from phasor.config.generation import SpecialTokens as SpecialTokens
    from phasor.config.lora import LoRAConfig as LoRAConfig
    from phasor.config.mixture import MixtureSource as MixtureSource
    from phasor.config.preference import PreferenceConfig as PreferenceConfig
    from phasor.config.recipe import DataConfig as DataConfig
    from phasor.config.recipe import MeshConfig as MeshConfig
    from phasor.config.recipe import OptimizerConfig as OptimizerConfig
    from phasor.config.recipe import Recipe as Recipe
    from phasor.config.recipe import SaveConfig as SaveConfig
    from phasor.config.recipe import TrainConfig as TrainConfig
    from phasor.config.schedules import ConstantSchedule as ConstantSchedule
    from phasor.config.schedules import CosineSchedule as CosineSchedule
    from phasor.config.schedules import InverseSqrtSchedule as InverseSqrtSchedule
    from phasor.config.schedules import LinearSchedule as LinearSchedule
    from phasor.config.schedules import StableSchedule as StableSchedule
    from phasor.evaluation import evaluate as evaluate
    from phasor.evaluation import translate as translate
    from phasor.generation import ChatSession as ChatSession
    from phasor.generation import Generated as Generated
    from phasor.generation import chat as chat
    from phasor.generation import generate as generate
    from phasor.generation import stream as stream
    from phasor.generation.engine import Engine as Engine
    from phasor.inspect.backends import backends as backends
    from phasor.inspect.explain import explain as explain
    from phasor.inspect.kinds import kinds as kinds
    from phasor.kv_cache.dynamic import KVCache as KVCache
    from phasor.models.presets import preset as preset
    from phasor.nn.attention import *  # noqa: F403
    from phasor.nn.moe import balancing_loss as balancing_loss
    from phasor.nn.positions import *  # noqa: F403
    from phasor.nn.positions.rotary.module import Rotary as Rotary
    from phasor.nn.record import Record as Record
    from phasor.quantization import quantize as quantize
    from phasor.training import train as train
    from phasor.transformer import Transformer as Transformer


def _kinds() -> dict[str, type[Any]]:
    """The configurations of position schemes, their extensions and kinds of attention, as found in their folders."""
    packages = importlib.import_module("phasor.config.discovery").PACKAGES
    return {name: cls for package in packages for name, cls in importlib.import_module(package).configs().items()}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # not a list of this file: it has what is found in folders
        return sorted([*_HOME_OF, *_kinds()])
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _kinds():
        value = _kinds()[name]
    else:
        raise AttributeError(f"phasor has no name {name!r}; it has: {', '.join(__dir__())}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME_OF, *_kinds(), "__version__"])
