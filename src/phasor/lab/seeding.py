"""Random weights of a seed, which leave torch's generator as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Weights that are made inside are those of a seed; torch's generator is kept.

    >>> with use_seed(3):
    ...     first = torch.nn.Linear(2, 2).weight
    >>> with use_seed(3):
    ...     torch.equal(first, torch.nn.Linear(2, 2).weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every kind of device, which takes 1 ms
        yield
