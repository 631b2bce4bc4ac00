"""Choices whose kinds are folders of a package: `KIND/config.py` (no torch), and the `module.py` that computes it.

The folders are in `phasor.nn`, above this package, beside the modules. They are imported by the name of their package
alone: no import statement goes up, and no list names them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

from phasor.config.schema import Choice

PACKAGES = ("phasor.nn.positions", "phasor.nn.attention")


def discover() -> None:
    """Import the configuration of every kind of these packages, which registers it."""
    for package in PACKAGES:
        importlib.import_module(package)


def import_configs(package: str) -> None:
    """Import `config.py` of every folder of a package that is not imported yet."""
    for folder in pkgutil.iter_modules(sys.modules[package].__path__):
        if folder.ispkg:
            importlib.import_module(f"{package}.{folder.name}.config")


def config_classes(*choices: type[Choice]) -> dict[str, type[Any]]:
    """The configuration classes of all kinds of some choices, by name."""
    return {cls.__name__: cls for choice in choices for cls in choice.kinds.values()}


def find_config(package: str, name: str, *choices: type[Choice]) -> type[Any]:
    """A configuration class by name, for the `__getattr__` of a package of kinds."""
    known = config_classes(*choices)
    if name not in known:
        raise AttributeError(f"{package} has no configuration {name!r}; it has: {', '.join(sorted(known))}")
    return known[name]
