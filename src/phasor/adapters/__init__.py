"""Adapters of a model: low-rank updates that are added to its layers, put in use by name and weight, and merged."""

from phasor.adapters.adapter import (
    DEFAULT,
    WHOLE,
    Adapter,
    BaseModel,
    PartConfig,
    adapter_names,
    adapter_tensors,
    is_adapter_weight,
)
from phasor.adapters.attach import adapter_weights, add_adapter, attach, initial_magnitudes
from phasor.adapters.layers import adaptable_layers, is_extra, matrix_shape, split_rows
from phasor.adapters.use import disable_adapters, merge_adapters, set_adapters, used_adapters

__all__ = [
    "DEFAULT",
    "WHOLE",
    "Adapter",
    "BaseModel",
    "PartConfig",
    "adaptable_layers",
    "adapter_names",
    "adapter_tensors",
    "adapter_weights",
    "add_adapter",
    "attach",
    "disable_adapters",
    "initial_magnitudes",
    "is_adapter_weight",
    "is_extra",
    "matrix_shape",
    "merge_adapters",
    "set_adapters",
    "split_rows",
    "used_adapters",
]
