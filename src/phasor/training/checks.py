"""Checks before a run writes anything: the recipe, what its device can do, and whether torch.compile works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from phasor.config.recipe import Recipe
from phasor.config.schema import quote, shorten
from phasor.parallel.processes import JoinedProcesses, Processes
from phasor.training.trainer import compiles_blocks


def check_recipe(recipe: object) -> None:
    """Refuse what is not a recipe.

    >>> check_recipe({"task": "lm"})
    Traceback (most recent call last):
    ...
    ValueError: train takes a Recipe, not {'task': 'lm'}: Recipe.from_dict makes one of a mapping
    """
    if isinstance(recipe, Recipe):
        check_texts(recipe.to_dict())
        return
    hint = "Recipe.from_dict makes one of a mapping" if isinstance(recipe, dict) else "Recipe.from_file reads a file"
    raise ValueError(f"train takes a Recipe, not {quote(recipe)}: {hint}")


def check_texts(fields: Mapping[str, Any], above: str = "") -> None:
    """Refuse texts that no file can hold, such as names of files that are not UTF-8: a run writes its recipe down."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            check_texts(value, f"{above}{name}.")
        elif isinstance(value, str) and not value.isprintable():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{above}{name} is not UTF-8 text: {quote(value)}") from None


def check_device(recipe: Recipe, device: torch.device, processes: Processes) -> None:
    """Refuse options that the device or several processes cannot do, and a compiler that does not work."""
    if recipe.train.cuda_graphs and isinstance(processes, JoinedProcesses):
        raise ValueError("TrainConfig.cuda_graphs captures the step of a process that is alone: leave it out here")
    if recipe.train.precision == "float8" and device.type != "cuda":
        raise ValueError(f"train.precision float8 needs a GPU, and the device is {device}: bfloat16 runs everywhere")
    if compiles_blocks(recipe, device):
        check_compiler(device)


def check_compiler(device: torch.device) -> None:
    """Compile something small, to see that the tools which torch.compile needs are there."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
    except Exception as error:  # something is missing: a C++ compiler, its headers, Triton
        reason = " ".join(str(error).split()).partition(" Set TORCH")[0]
        raise ValueError(
            f"train.compile does not work on {device} here, set it to false: {shorten(reason, 300)}"
        ) from None
