"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module | None) -> Iterator[None]:
    """Put models into evaluation mode inside a `with`; afterward every module is in the mode it had before.

    >>> model = nn.Linear(2, 2)
    >>> with eval_mode(model):
    ...     model.training
    False
    >>> model.training
    True
    """
    modules = [module for model in models if model is not None for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
