"""Fresh weights one part of a model at a time: the same bits as of a model that is built whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.block import Block
from phasor.nn.init import initialize
from phasor.transformer import Transformer


class DrawAndDrop(TorchDispatchMode):
    """Draws what layers draw when they are built, for tensors on the meta device too, and drops it.

    Random generators are then where building a model in memory leaves them.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.uniform_.default and args[0].is_meta:
            torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu").uniform_()
            return args[0]
        return operation(*args, **(kwargs or {}))


def fresh_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of `Transformer(config)` after `torch.manual_seed(seed)`, by name; those of one block at a time.

    >>> config = ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4)
    >>> _ = torch.manual_seed(0)
    >>> whole = dict(Transformer(config).named_parameters())
    >>> all(torch.equal(whole[name], weight) for name, weight in fresh_weights(config, 0))
    True
    """
    torch.manual_seed(seed)
    with torch.device("meta"), DrawAndDrop():
        model = Transformer(config)
    side: Side = "encoder" if model.decoder is None else "decoder"
    for name, child in model.named_children():
        for at, part in parts_of(name, child):
            part.to_empty(device="cpu")
            initialize(part, config, "encoder" if name == "encoder" else side)
            weights = chain(part.named_parameters(), part.named_buffers())
            yield from ((f"{at}.{inner}", weight.detach()) for inner, weight in weights)
            part.to("meta")


def parts_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks inside of a module and what stands beside them, in order, with their names."""
    if isinstance(module, Block) or not any(isinstance(part, Block) for part in module.modules()):
        yield name, module
        return
    for inner, child in module.named_children():
        yield from parts_of(f"{name}.{inner}", child)
