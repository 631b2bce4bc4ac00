"""Attention never holds anything of queries by keys, and long sequences fit in little memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from schemes import SCHEMES, build, tiny, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COUNT = 2048  # tokens: four blocks of queries
FIXED_SIZES = {"num_heads": 2, "num_kv_heads": 1, "max_length": COUNT}  # a block's scores are then half of n x n


class NothingSquare(TorchDispatchMode):
    """Fails on any operation, in the forward or the backward pass, whose result has n x n entries."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                square = sum(size >= COUNT for size in x.shape) > 1 or x.numel() >= COUNT * COUNT
                assert not square, f"{func} made {list(x.shape)}"
        return out


def arrangement(name: str) -> dict[str, Tensor]:
    at = torch.arange(COUNT)[None]
    return {
        "plain": {},
        "left-padded": {"padding": at >= 100},
        "right-padded": {"padding": at < COUNT - 100},
        "packed": {"documents": at // 700},
        "packed and padded": {"documents": at // 700, "padding": at < COUNT - 100},
    }[name]


ARRANGEMENTS = ("plain", "left-padded", "right-padded", "packed", "packed and padded")


def check(config: Any, given: dict[str, Any]) -> None:
    model = build(config)
    with NothingSquare():
        model(tokens(1, COUNT), **given).square().mean().backward()


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("scheme", ["rotary", "t5", "alibi"])
def test_masks_and_biases_are_never_square(scheme, window, shape, name):
    config = tiny(scheme, **FIXED_SIZES, shape=shape, num_layers=1, attention={"window": window})
    check(config, arrangement(name))
