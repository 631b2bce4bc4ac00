"""Modules of choices: each computes a configuration, which it names when it is defined."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, Self

from torch import nn

from phasor.config.schema import Choice


class KindModule(nn.Module):
    """The base of modules that compute a kind of a choice: `class ALiBi(Position, config=ALiBiConfig)`."""

    modules_by_config: ClassVar[dict[type[Choice], type[KindModule]]] = {}

    def __init_subclass__(cls, config: type[Choice] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if config is not None:
            KindModule.modules_by_config[config] = cls

    @classmethod
    def class_for(cls, config: type[Choice]) -> type[Self]:
        """The module that computes a configuration: its own, or that of the class it extends.

        A configuration in a file `config.py` has its module in `module.py` beside it, which is imported here.

        >>> from phasor.nn.positions.base import Position
        >>> from phasor.nn.positions.rotary.config import RotaryConfig
        >>> Position.class_for(RotaryConfig).__name__
        'Rotary'
        """
        for base in (base for base in config.__mro__ if issubclass(base, Choice)):
            package, _, file = base.__module__.rpartition(".")
            if base not in cls.modules_by_config and file == "config":
                importlib.import_module(f"{package}.module")
            module = cls.modules_by_config.get(base)
            if module is not None and issubclass(module, cls):
                return module
        raise ValueError(
            f"no module computes the {config.what} {config.kind!r}: "
            f"define one as `class Name({cls.__name__}, config={config.__name__})`"
        )
