"""Linear layers with adapters: the hook that adds their updates to what a layer gives.

A layer can be any module with `in_features`, `out_features` and `bias` that multiplies by a matrix; one that holds this
in another form than `weight` gives it by `full_weight()`, which DoRA and merging ask for, and one whose bias is added
elsewhere has `adds_bias` False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from phasor.nn.lora import LoRA


def adapters_of(layer: nn.Module) -> dict[str, LoRA]:
    """The adapters of a layer by name."""
    return cast(dict[str, LoRA], dict(cast(nn.ModuleDict, layer.lora).items())) if "lora" in layer._modules else {}


def active_adapters(layer: nn.Module) -> Iterator[LoRA]:
    """Those of a layer's adapters that are in use."""
    return (lora for lora in adapters_of(layer).values() if lora.strength)


def full_weight(layer: Any) -> Tensor:
    """The matrix `[out, in]` of a linear layer that an adapter updates."""
    weight: Tensor = layer.full_weight() if hasattr(layer, "full_weight") else layer.weight
    return weight


def add_updates(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """A hook on linear layers: the layer's output and what its adapters add to it."""
    given = y
    for lora in active_adapters(layer):
        y = add_update(layer, lora, given, y, partial(lora.project, args[0]))
    return y


def add_update(layer: Any, lora: LoRA, given: Tensor, y: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """`y` and what one adapter adds to the layer's own output, which is given; `multiply` gives `A x`."""
    bias = layer.bias if getattr(layer, "adds_bias", True) else None
    return lora.add(y, multiply, lambda: given if bias is None else given - bias, partial(full_weight, layer))


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks besides that of adapters, which may run anything around its forward."""
    return bool(module._forward_pre_hooks) or any(hook is not add_updates for hook in module._forward_hooks.values())


def lone_update(layer: nn.Module) -> LoRA | None:
    """The adapter of a linear layer, where it is the only one in use, of one part and without dropout.

    None for a layer with other hooks, which have to see it called.
    """
    used = list(active_adapters(layer))
    if len(used) != 1 or len(used[0].updates) != 1 or (used[0].dropout and used[0].training):
        return None
    hooks = layer._backward_hooks or layer._backward_pre_hooks or has_other_hooks(layer) or "forward" in layer.__dict__
    return None if hooks else used[0]
