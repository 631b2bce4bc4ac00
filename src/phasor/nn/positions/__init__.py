"""Position schemes: one folder each, named after its kind, with its `config.py` (no torch) and its `module.py`.

A new scheme is a new folder here. Importing this package imports the configuration of every folder, which registers
its kind; `build_position` in `base.py` imports the module of a scheme when a model needs it. What is exported here are
the configurations. The list below is for type checkers alone: a scheme that is missing from it works the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phasor.config.discovery import config_classes, find_config, import_configs
from phasor.config.positions import Extension, PositionConfig

if TYPE_CHECKING:
    from phasor.nn.positions.accumulated.config import AccumulatedRotaryConfig as AccumulatedRotaryConfig
    from phasor.nn.positions.alibi.config import ALiBiConfig as ALiBiConfig
    from phasor.nn.positions.axial.config import AxialConfig as AxialConfig
    from phasor.nn.positions.combined.config import CombinedConfig as CombinedConfig
    from phasor.nn.positions.cope.config import CoPEConfig as CoPEConfig
    from phasor.nn.positions.counting.config import CountingConfig as CountingConfig
    from phasor.nn.positions.disentangled.config import DisentangledConfig as DisentangledConfig
    from phasor.nn.positions.dualchunk.config import DualChunkConfig as DualChunkConfig
    from phasor.nn.positions.fire.config import FIREConfig as FIREConfig
    from phasor.nn.positions.forget.config import ForgetGateConfig as ForgetGateConfig
    from phasor.nn.positions.grape.config import GRAPEConfig as GRAPEConfig
    from phasor.nn.positions.kerple.config import KERPLEConfig as KERPLEConfig
    from phasor.nn.positions.learned.config import LearnedConfig as LearnedConfig
    from phasor.nn.positions.mrope.config import MultiSectionConfig as MultiSectionConfig
    from phasor.nn.positions.none.config import NoPositionConfig as NoPositionConfig
    from phasor.nn.positions.normalized.config import NormalizedConfig as NormalizedConfig
    from phasor.nn.positions.pope.config import PoPEConfig as PoPEConfig
    from phasor.nn.positions.profiles.config import ProfilesConfig as ProfilesConfig
    from phasor.nn.positions.rotary.config import RotaryConfig as RotaryConfig
    from phasor.nn.positions.rotary.scaling import DynamicNTKScaling as DynamicNTKScaling
    from phasor.nn.positions.rotary.scaling import DynamicYaRN as DynamicYaRN
    from phasor.nn.positions.rotary.scaling import LinearScaling as LinearScaling
    from phasor.nn.positions.rotary.scaling import Llama3Scaling as Llama3Scaling
    from phasor.nn.positions.rotary.scaling import LongRoPE as LongRoPE
    from phasor.nn.positions.rotary.scaling import NTKScaling as NTKScaling
    from phasor.nn.positions.rotary.scaling import ProportionalScaling as ProportionalScaling
    from phasor.nn.positions.rotary.scaling import YaRN as YaRN
    from phasor.nn.positions.sandwich.config import SandwichPositionConfig as SandwichPositionConfig
    from phasor.nn.positions.selfextend.config import SelfExtendConfig as SelfExtendConfig
    from phasor.nn.positions.shaw.config import ShawConfig as ShawConfig
    from phasor.nn.positions.sinusoidal.config import SinusoidalConfig as SinusoidalConfig
    from phasor.nn.positions.t5.config import T5PositionConfig as T5PositionConfig
    from phasor.nn.positions.temperature.config import TemperatureConfig as TemperatureConfig
    from phasor.nn.positions.transformerxl.config import TransformerXLConfig as TransformerXLConfig
    from phasor.nn.positions.xpos.config import XPosConfig as XPosConfig


def configs() -> dict[str, type[Any]]:
    """The configuration classes of all schemes and extensions, by name.

    >>> configs()["RotaryConfig"].kind, configs()["YaRN"].kind
    ('rotary', 'yarn')
    """
    return config_classes(PositionConfig, Extension)


def __getattr__(name: str) -> Any:
    return find_config(__name__, name, PositionConfig, Extension)


import_configs(__name__)
