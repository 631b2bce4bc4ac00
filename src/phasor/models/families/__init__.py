"""The families phasor reads and writes: one module each, named as its `model_type`, that defines `FAMILY`."""

from __future__ import annotations

import importlib
import pkgutil

from phasor.models.family import Family


def names() -> list[str]:
    """The `model_type` of every family."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def family(name: str) -> Family:
    """A family by its `model_type`.

    >>> family("llama").architectures["lm"]
    'LlamaForCausalLM'
    """
    return importlib.import_module(f"{__name__}.{name}").FAMILY
