"""The families phasor reads and writes: one module each, named as its `model_type`, that defines `FAMILY`.

A hyphen of a `model_type` is a double underscore in the module's name.
"""

from __future__ import annotations

import importlib
import pkgutil

from phasor.models.family import Family

# Types whose models are those of a family, and that transformers has under that name alone.
SAME_AS = {"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"}


def names() -> list[str]:
    """The `model_type` of every family."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(module.replace("__", "-") for module in modules if not module.startswith("_"))


def family(name: str) -> Family:
    """A family by its `model_type`.

    >>> family("llama").architectures["lm"]
    'LlamaForCausalLM'
    """
    return importlib.import_module(f"{__name__}.{name.replace('-', '__')}").FAMILY
