"""How the package `lm_eval` comes to know the model "phasor" in the environment that this file was copied into.

`python -m phasor.evaluation.lm_eval --register` copies it to site-packages as phasor_lm_eval.py, beside a .pth file of
one line, which Python runs at every start. The line imports nothing: it has Python ask `find_models` once lm_eval
imports the list of its models. `--unregister` deletes both files.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODELS = "lm_eval.models"  # where lm_eval registers its own
NAME = "phasor"
TARGET = "phasor.evaluation.lm_eval:PhasorLM"  # imported when the model is asked for


def find_models(path: Sequence[str] | None) -> ModuleSpec | None:
    """The module `lm_eval.models` as Python finds it, with phasor's model registered after its own.

    `path` is where the modules of lm_eval are.

    >>> find_models([]) is None
    True
    """
    spec = PathFinder.find_spec(MODELS, path)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            try:
                register_model()
            except Exception as error:  # lm_eval has to work, whatever becomes of its registry
                warnings.warn(f"lm_eval runs without the model {NAME}: {error}", stacklevel=2)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
    return spec


def register_model() -> None:
    """Tell lm_eval where the model is."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
