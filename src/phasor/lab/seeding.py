"""Random weights of a seed: torch has one generator for them, and the lab computes in two threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ONE_AT_A_TIME = threading.Lock()


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Weights that are made inside are those of a seed, also while other threads draw; torch's generator is kept.

    >>> with use_seed(3):
    ...     first = torch.nn.Linear(2, 2).weight
    >>> with use_seed(3):
    ...     torch.equal(first, torch.nn.Linear(2, 2).weight)
    True
    """
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every kind of device, which takes 1 ms
        yield
