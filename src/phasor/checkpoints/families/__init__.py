"""The families phasor reads and writes: every module of this package that defines `FAMILY`."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from phasor.checkpoints.family import Family


@functools.cache
def families() -> dict[str, Family]:
    """All families by their `model_type`."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in modules if not name.startswith("_")]
    return {module.FAMILY.model_type: module.FAMILY for module in loaded}
